"""Stages of preempted requests, in SGLang's traces and in metrics."""

from __future__ import annotations

import time

from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.engine.core.tracing import trace

_SINCE = "_sgl_ext_swapped_since"
"""Attribute of SGLang's ``Req``: when it was swapped out, on the clock of
:func:`time.perf_counter`."""


def swapped_out(req: Req, began: float, tokens: int) -> None:
    """Adds the span of the scheduler's work for a swap-out; the copies may still be in progress.

    Args:
        began: begin of the span, on the clock of :func:`time.perf_counter`.
        tokens: tokens of the request that had KV.
    """
    setattr(req, _SINCE, now := time.perf_counter())
    trace(req, "swap_out", now - began, ended=now, tokens=tokens)


def swapped_in(req: Req, seconds: float, loaded: int) -> None:
    """Adds the span of a copy that has ended.

    Args:
        seconds: duration of the copy.
        loaded: tokens of KV that were copied.
    """
    trace(req, "swap_in", seconds, loaded=loaded)


def away(req: Req, *, resumed: bool) -> None:
    """Adds the span from the swap-out until the request is resumed, or its KV is given up."""
    if (since := getattr(req, _SINCE, None)) is not None:
        delattr(req, _SINCE)
        now = time.perf_counter()
        trace(req, "swapped", now - since, ended=now, resumed=resumed)
