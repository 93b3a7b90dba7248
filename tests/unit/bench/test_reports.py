"""Reports of benchmarks: their tables at 80 columns, and their page."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from rich.console import Console
from typer.testing import CliRunner

from sgl_ext.bench import plots
from sgl_ext.bench.harness.runs import Kind, cell, kinds, tables
from sgl_ext.cli import app

RECORDS = sorted((ROOT / "sgl_ext" / "bench" / "results").glob("*.json"))
RUNS: list[dict[str, Any]] = [
    {"what": "ttft, 1024 tokens", "system": name, "samples": 4, "batch": batch,
     "more": [1.0, 2.0], **{f"ttft_ms_p{p}": 1000 * batch + p + 0.25 for p in (50, 90, 99)}}
    for name in ("stock SGLang", "<tiers>") for batch in (1, 4)
]  # fmt: skip


def text(runs: list[dict[str, Any]], width: int) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    for kind in kinds(runs):
        for table in tables(kind, "bench", width):
            console.print(table)
    return console.export_text()


def test_runs_are_named_by_what_tells_them_apart() -> None:
    (kind,) = kinds(RUNS)
    assert kind.name == "ttft"
    assert kind.shared["samples"] == 4
    assert [*kind.keys] == ["system", "batch"]
    assert kind.label(kind.runs[1]) == "stock SGLang, 4"
    assert "ttft_ms_p50" in kind.values


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_number_is_cut_off(width: int) -> None:
    shown = text(RUNS, width)
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    assert shown.count("1,050") == 2
    assert "…" not in shown
    # All columns are beside each other if there is room.
    assert (shown.count("stock SGLang") == 2) == (width > 40)


def test_values_have_four_digits() -> None:
    assert [cell(value) for value in (0.123456, 12.3456, 12345.6, 7, None, "x")] == [
        "0.1235", "12.35", "12,346", "7", "", "x",
    ]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_committed_record_fits_80_columns(record: Path) -> None:
    for line in text(json.loads(record.read_text())["runs"], 80).splitlines():
        assert len(line.rstrip()) <= 80
        assert "…" not in line


def test_the_page_has_a_table_and_a_plot_of_each_kind(
    tmp_path: Path,
) -> None:
    record = {
        "name": "tiers", "machine": {"cpu": "<some>"}, "config": {"quick": True},
        "figures": {"ratio": 1.5}, "runs": RUNS,
    }  # fmt: skip
    (tmp_path / "tiers.json").write_text(json.dumps(record))
    command = ["report", str(tmp_path / "tiers.json"), "--out", str(tmp_path / "page.html")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert "&lt;tiers&gt;" in page and "<tiers>" not in page and "<some>" not in page
    assert page.count('<table class="plot">') == 1
    assert page.count("1,050") == 4  # in the table and in the plot
    assert "page.html" in done.output


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_committed_record_has_plots(record: Path) -> None:
    found = json.loads(record.read_text())
    several = [kind for kind in kinds(found["runs"]) if len(kind.runs) > 1]
    numbers = [kind for kind in several if any(_is_number(kind, each) for each in kind.values)]
    for kind in numbers:
        shown = [*plots.plots(kind)]
        assert shown, kind.name
        for plot in shown:
            assert bool(plot.bars) != bool(plot.lines)
            assert all(0 <= bar.length <= 100 for bar in plot.bars)
            points = [point for line in plot.lines for point in line.points]
            assert all(0 <= x <= plots.WIDTH and 0 <= y <= plots.HEIGHT for x, y in points)


def _is_number(kind: Kind, column: str) -> bool:
    return all(isinstance(run.get(column), int | float) for run in kind.runs)


def test_lines_are_drawn_over_a_number_that_names_runs() -> None:
    runs = [
        {"what": "ttft", "system": name, "tokens": tokens, "ttft_ms_p50": 2.0 * tokens}
        for name in ("one", "two") for tokens in (400, 100, 1600)
    ]  # fmt: skip
    (kind,) = kinds(runs)
    (plot,) = plots.plots(kind)
    assert plot.title == "ttft_ms_p50 over tokens"
    assert [line.label for line in plot.lines] == ["one", "two"]
    # 400 is in the middle of a logarithmic axis from 100 to 1600.
    across, down = zip(*plot.lines[0].points, strict=True)
    assert across == pytest.approx((0, plots.WIDTH / 2, plots.WIDTH))
    assert down == pytest.approx((plots.HEIGHT * 15 / 16, plots.HEIGHT * 3 / 4, 0))
    assert plot.ticks[1] == (pytest.approx(plots.WIDTH / 2), "400")


def test_bars_have_a_spread_and_no_column_of_a_spread_is_plotted() -> None:
    runs = [
        {"what": "ruler", "system": name, "accuracy": of, "low": of - 0.1, "high": of + 0.1}
        for name, of in (("one", 0.5), ("two", 0.25))
    ]
    (kind,) = kinds(runs)
    (plot,) = plots.plots(kind)
    assert plot.title == "accuracy"
    assert [(bar.label, bar.length, bar.spread) for bar in plot.bars] == [
        ("one", 100, "0.4 to 0.6"), ("two", 50, "0.15 to 0.35"),
    ]  # fmt: skip


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": "x"}')
    done = CliRunner().invoke(app, ["report", str(tmp_path / "x.json")])
    assert done.exit_code == 1
    assert re.search(r"x\.json is not a record of a benchmark: .*machine", done.stderr)
