"""Stages of requests in the powers: spans in SGLang's traces (``--enable-trace``), and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.sglang_types import Req

_LEVEL = 2
"""Level of SGLang's stages that contain others; ``SGLANG_TRACE_LEVEL`` chooses the levels."""
EACH_STEP = 3
"""Level of SGLang's stages that each decode step has."""


def traced(req: Req) -> bool:
    """Returns whether SGLang traces the request."""
    return bool(req.time_stats.trace_ctx.tracing_enable)


def trace(
    req: Req, stage: str, seconds: float, *, ended: float | None = None, **found: float | str
) -> None:
    """Adds a span to the request's trace, and its duration to the metrics.

    The span needs a traced request, the duration a server with metrics.

    Args:
        stage: name of the span, without the prefix ``ext_``.
        seconds: duration of the span; 0 for an event, which the metrics do not count.
        ended: end of the span, on the clock of :func:`time.perf_counter`; None for now.
        found: attributes of the span.
    """
    ext = runtime.current
    if seconds and ext is not None and ext.stage_seconds is not None:
        ext.stage_seconds.of(stage).observe(seconds)
    if traced(req):
        add_span(req, stage, seconds, found, ended=ended)


def add_span(
    req: Req,
    stage: str,
    seconds: float,
    found: Mapping[str, float | str],
    *,
    ended: float | None = None,
    level: int = _LEVEL,
) -> None:
    """Adds a span to the trace of a request that is traced; see :func:`trace`."""
    from sglang.srt.observability.req_time_stats import RequestStageConfig

    end = time.perf_counter() if ended is None else ended  # the clock of SGLang's stages
    req.time_stats.trace_slice(
        RequestStageConfig(f"ext_{stage}", level=level), end - seconds, end, dict(found)
    )
