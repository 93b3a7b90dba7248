"""Draws the results of ``python -m sgl_ext.bench chunks``: ``plot_chunks.py FIGURE.svg JSON…``.

The JSON files are those of the whole benchmark, or of its parts ``speed`` and ``methods``. Needs
matplotlib (``pip install 'sgl-ext[plot]'``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from sgl_ext.bench.chunks.linked import DEFAULT

_OURS = ("primed", "primed+head-8", DEFAULT)
_SHOWN = {"stock": "stock SGLang", "blend-15": "CacheBlend-15", "lego-16": "LegoLink-16"}
_ACCURACY = "divergence, documents as they are, all methods"
_TTFT = "ttft, chunks of 512, "


def _pareto(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Draws the divergence over the computed share."""
    found = sorted((run for run in runs if run["what"] == _ACCURACY), key=lambda run: run["cost"])
    best: list[dict[str, Any]] = []
    for run in found:
        if not best or run["klt"] < best[-1]["klt"]:
            best.append(run)
    axes.plot([run["cost"] for run in best], [run["klt"] for run in best], color="0.8", zorder=0)
    for run in found:
        colour = "tab:red" if run["system"] in _OURS else "tab:blue"
        error = [[run["klt"] - run["klt_low"]], [run["klt_high"] - run["klt"]]]
        axes.errorbar(run["cost"], run["klt"], yerr=error, fmt="o", color=colour, capsize=2)
        axes.annotate(
            run["system"], (run["cost"], run["klt"]), xytext=(6, 4), textcoords="offset points",
            fontsize=8, color=colour, weight="bold" if run["system"] == DEFAULT else "normal",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.margins(x=0.1)
    axes.set_xlabel("computed, of the prompt's tokens and layers")
    axes.set_ylabel("KL from computing everything, nats")
    axes.set_title(f"{found[0]['samples']} questions over their documents")


def _speed(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Draws the time to first token over the length of the prompt."""
    shown = {**_SHOWN, DEFAULT: DEFAULT}
    for system, label in shown.items():
        points = [
            (int(run["what"].removeprefix(_TTFT).split()[0]), run["ttft_ms_p50"])
            for run in runs
            if run["what"].startswith(_TTFT) and run["system"] == system
        ]
        lengths, milliseconds = zip(*sorted(points), strict=True)
        axes.plot(lengths, milliseconds, "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.set_xticks(lengths)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("time to first token, ms")
    axes.legend(frameon=False)
    axes.set_title("prompts of 512-token chunks")


def main(figure: Path, *measured: Path) -> None:
    runs = [run for each in measured for run in json.loads(each.read_text())["runs"]]
    with plt.rc_context({"svg.hashsalt": "sgl_ext", "axes.spines.top": False}):
        drawing, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        _pareto(left, runs)
        _speed(right, runs)
        drawing.savefig(figure, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
