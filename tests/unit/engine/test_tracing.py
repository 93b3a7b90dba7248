"""Spans of the powers in SGLang's traces."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from trace_kit import RecordedTrace, time_stats

from sgl_ext.engine.core.tracing import trace


def request(recorded: RecordedTrace) -> Any:
    return SimpleNamespace(time_stats=time_stats(recorded))


def test_a_span_ends_now_and_has_its_duration_and_attributes() -> None:
    recorded = RecordedTrace()
    before = time.time_ns()
    trace(request(recorded), "tiers_load", 0.5, ssd=1024, method="x")
    (found,) = recorded.slices
    assert found.slice_name == "ext_tiers_load"
    assert found.attrs == {"ssd": 1024, "method": "x"}
    assert found.end_time_ns is not None
    assert abs(found.end_time_ns - found.start_time_ns - 500_000_000) < 1000
    # SGLang converts its clock to the wall clock, once for the process.
    assert abs(found.end_time_ns - before) < 5_000_000_000


def test_requests_that_are_not_traced_get_no_span() -> None:
    recorded = RecordedTrace(enabled=False)
    trace(request(recorded), "tiers_load", 0.5, ssd=1024)
    assert not recorded.slices
