"""Traces of requests that keep their spans."""

from __future__ import annotations

from typing import Any

from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.observability.trace import TraceSliceContext


class RecordedTrace:
    """SGLang's trace of a request; ``slices`` has its spans."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.tracing_enable = enabled
        self.slices: list[TraceSliceContext] = []

    def trace_slice(self, slice: TraceSliceContext) -> None:  # noqa: A002  (SGLang's name)
        self.slices.append(slice)


def time_stats(recorded: RecordedTrace) -> Any:
    """Returns ``time_stats`` of a request whose trace is ``recorded``."""
    stats = SchedulerReqTimeStats()
    stats.trace_ctx = recorded  # type: ignore[assignment]
    return stats
