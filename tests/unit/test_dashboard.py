"""The Grafana dashboard: it is the one that its script writes, and its metrics exist."""

from __future__ import annotations

import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

from conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "dashboard.py"))
WRITTEN = json.loads(SCRIPT["TARGET"].read_text())
_METRIC = re.compile(r"sglang(?:_ext)?:\w+")
_DEFINED = re.compile(r'"(sglang(?:_ext)?:\w+)"')
_SUFFIXES = ("_total", "_bucket")


def used() -> set[str]:
    """Returns the metrics of all panels, without the suffixes of counters and histograms."""
    found = set(_METRIC.findall(json.dumps(WRITTEN)))
    for suffix in _SUFFIXES:
        found = {name.removesuffix(suffix) for name in found}
    return found


def defined() -> set[str]:
    """Returns the metrics that SGLang defines, and those that the READMEs of the powers list."""
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "srt" / "observability" / "metrics_collector.py"
    found = set(_DEFINED.findall(source.read_text()))
    for readme in (ROOT / "sgl_ext").glob("*/README.md"):
        found |= set(re.findall(r"`(sglang_ext:\w+)`", readme.read_text()))
    return found


def test_the_dashboard_is_the_one_of_the_script() -> None:
    assert SCRIPT["dashboard"]() == WRITTEN


def test_every_metric_of_a_panel_exists() -> None:
    assert len(used()) > 30
    assert used() <= defined()


def test_every_power_has_a_panel() -> None:
    powers = {name.partition(":")[2].partition("_")[0] for name in used()}
    assert powers >= {"tiers", "restore", "chunks", "clusters", "swap", "peer", "planning"}


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in WRITTEN["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"])
               for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & own, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own
