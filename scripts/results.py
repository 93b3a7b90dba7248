"""Generates the tables and figures of ``sgl_ext/bench/RESULTS.md`` from the committed results.

``scripts/results.py`` rewrites each table between ``<!-- table NAME -->`` and ``<!-- end -->``.
``scripts/results.py figures`` also draws ``examples/figures/*.svg``, and needs matplotlib
(``pip install 'sgl-ext[plot]'``).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Not implied where PYTHONSAFEPATH is set.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tables import TABLES
from tables.forms import Column

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "sgl_ext" / "bench" / "RESULTS.md"
FIGURES = ROOT / "examples" / "figures"


def rendered(page: str) -> str:
    """Returns the page with every table generated again.

    Raises:
        KeyError: the page has a table that is not in :data:`tables.TABLES`.
    """

    def table(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found[1]].lines())
        return f"<!-- table {found[1]} -->\n{lines}\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, page, flags=re.S)


def draw() -> None:
    """Draws one figure of bars for each table in :data:`BARS`."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    for name, (at, title) in BARS.items():
        table = TABLES[name]
        column = [each for each in table.columns if isinstance(each, Column)][at]
        bars = {
            label.replace("`", ""): value
            for label, row in table.rows.items()
            if (value := table.value(row, column)) is not None
        }
        with plt.rc_context({"svg.hashsalt": "sgl_ext", "axes.spines.top": False}):
            size = (8, 0.5 + 0.4 * len(bars))
            drawing, axes = plt.subplots(figsize=size, layout="constrained")
            drawn = axes.barh([*bars], [*bars.values()], color="tab:blue")
            axes.bar_label(drawn, [column.form(value) for value in bars.values()], padding=3)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.spines["right"].set_visible(False)
            axes.xaxis.set_visible(False)
            axes.set_title(title, loc="left", fontsize=10)
            drawing.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
            plt.close(drawing)


BARS = {
    "tiers": (0, "Median TTFT of later turns"),
    "chunks": (1, "Median TTFT of prompts of 4,096 tokens"),
    "restore": (0, "TTFT of a stored prefix of 4,096 tokens"),
    "swap": (0, "TTFT, 95th percentile, under overload"),
    "peer": (0, "Longest request, in tokens"),
    "clusters": (0, "Attention mass of a tenth of the entries, relative to the best tenth"),
}
"""Shown column and title of each figure, by table."""


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
    if sys.argv[1:] == ["figures"]:
        draw()
