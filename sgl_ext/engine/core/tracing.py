"""Spans of the powers in SGLang's traces of requests (``--enable-trace``)."""

from __future__ import annotations

import time

from sgl_ext.engine.core.sglang_types import Req

_LEVEL = 2
"""Level of SGLang's stages that contain others; ``SGLANG_TRACE_LEVEL`` chooses the levels."""


def traced(req: Req) -> bool:
    """Returns whether SGLang traces the request."""
    return bool(req.time_stats.trace_ctx.tracing_enable)


def trace(req: Req, stage: str, seconds: float, **found: float | str) -> None:
    """Adds a span to the request's trace that ends now; does nothing if it is not traced.

    Args:
        stage: name of the span, without the prefix ``ext_``.
        seconds: duration of the span.
        found: attributes of the span.
    """
    if not traced(req):
        return
    from sglang.srt.observability.req_time_stats import RequestStageConfig

    now = time.perf_counter()  # the clock of SGLang's stages
    req.time_stats.trace_slice(
        RequestStageConfig(f"ext_{stage}", level=_LEVEL), now - seconds, now, found
    )
