"""Stages of preempted requests in SGLang's traces."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from trace_kit import RecordedTrace, time_stats

from sgl_ext.engine.swap import spans


def request(recorded: RecordedTrace) -> Any:
    return SimpleNamespace(time_stats=time_stats(recorded))


def test_a_swapped_request_is_away_from_its_swap_out_until_it_is_resumed() -> None:
    recorded = RecordedTrace()
    req = request(recorded)
    for resumed in (True, False):  # preempted twice
        began = time.perf_counter()
        time.sleep(0.01)
        spans.swapped_out(req, began, tokens=100)
        time.sleep(0.02)
        spans.away(req, resumed=resumed)
        out, away = recorded.slices
        recorded.slices.clear()
        assert (out.slice_name, out.attrs) == ("ext_swap_out", {"tokens": 100})
        assert (away.slice_name, away.attrs) == ("ext_swapped", {"resumed": resumed})
        assert (out.end_time_ns or 0) - out.start_time_ns >= 10_000_000
        assert (away.end_time_ns or 0) - away.start_time_ns >= 20_000_000
        assert abs((out.end_time_ns or 0) - away.start_time_ns) < 1000  # rounded


def test_a_request_that_was_not_swapped_out_is_not_away() -> None:
    recorded = RecordedTrace()
    spans.away(request(recorded), resumed=True)
    assert not recorded.slices
