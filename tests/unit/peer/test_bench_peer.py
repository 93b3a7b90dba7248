"""Parts of the peer benchmark that need no servers."""

from __future__ import annotations

import pytest

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.peer import resize as peer_resize


def test_resize_report_covers_free_blocks_and_whole_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_resize, "_REPEATS", 3)
    monkeypatch.setattr(peer_resize, "_WHOLE_REPEATS", 3)
    report = Report("peer", {})
    peer_resize.report_resize(report)
    assert set(report.figures) == {"resize_us_ratio", "resize_whole_us_ratio"}
    assert [(run["what"], run["blocks"], run["cached_sequences"]) for run in report.runs] == [
        ("resize", 1_000, 0),
        ("resize", 100_000, 0),
        ("resize_whole", 1_000, 10),
        ("resize_whole", 100_000, 10),
        ("resize_whole", 100_000, 1_000),
    ]
    assert all(run["resize_us_p50"] > 0 for run in report.runs)
