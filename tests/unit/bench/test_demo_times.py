"""Benchmark of the demonstrations: columns are compared with the first one of the same round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_ext.bench import demo
from sgl_ext.demo.powers import DEMOS
from sgl_ext.demo.side import Side


def test_columns_are_compared_within_a_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = iter([(8.0, 2.0, 1.0), (6.0, 3.0, 1.0), (4.0, 1.0, 4.0)])

    def tiers() -> Iterator[Side]:
        computed, host, ssd = next(rounds)
        yield Side("computed", seconds=computed)
        yield Side("from host memory", seconds=host)
        yield Side("from the SSD", seconds=ssd)

    def peer() -> Iterator[Side]:
        yield Side("own memory", {"answer": "refused"})
        yield Side("borrowed", seconds=3.0)

    monkeypatch.setitem(DEMOS, "tiers", tiers)
    monkeypatch.setitem(DEMOS, "peer", peer)
    report = demo.run(quick=False, out=tmp_path, parts=("tiers", "peer"))
    took = [report.figures.pop(f"demo_{power}_took_s") for power in ("tiers", "peer")]
    assert min(took) >= 0
    assert report.figures == {"demo_tiers_1_speedup": 4.0, "demo_tiers_2_speedup": 6.0}
    found = {(run["system"], run["title"]): run for run in report.runs}
    assert len(found) == 4
    host = found["tiers", "from host memory"]
    assert (host["low_s"], host["seconds_p50"], host["high_s"]) == (1.0, 2.0, 3.0)
    assert found["peer", "borrowed"]["rounds"] == 3
    assert [*tmp_path.iterdir()] == []
