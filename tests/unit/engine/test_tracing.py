"""Spans of the powers in SGLang's traces."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from trace_kit import RecordedTrace, time_stats

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.metrics import Metrics, stage_seconds
from sgl_ext.engine.core.runtime import ExtRuntime
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


def test_stages_with_a_duration_are_counted_whether_or_not_they_are_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = stage_seconds(Metrics({"model_name": "m"}))
    ext = ExtRuntime(ExtConfig(), stage_seconds=counted)
    monkeypatch.setattr(runtime, "current", ext)
    recorded = RecordedTrace(enabled=False)
    for seconds in (0.5, 2.0, 0.0):
        trace(request(recorded), "tiers_load", seconds)
    labels = {"model_name": "m", "stage": "tiers_load"}
    assert REGISTRY.get_sample_value("sglang_ext:stage_seconds_count", labels) == 2
    assert REGISTRY.get_sample_value("sglang_ext:stage_seconds_sum", labels) == 2.5
