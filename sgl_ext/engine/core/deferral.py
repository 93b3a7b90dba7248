"""Time for which powers have deferred the admission of a request, in its trace and in metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable

from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.engine.core.tracing import trace

_DEFERRED = "_sgl_ext_deferred"
"""Attribute of SGLang's ``Req``: when its admission was deferred first, on the clock of
:func:`time.perf_counter`, and the names of the powers that have deferred it."""


def deferred(req: Req, powers: Iterable[str]) -> None:
    """Notes that powers have deferred the admission of a request in this step."""
    if (found := getattr(req, _DEFERRED, None)) is None:
        setattr(req, _DEFERRED, found := (time.perf_counter(), set[str]()))
    found[1].update(powers)


def ended(req: Req) -> None:
    """Adds the span ``ext_wait`` of a request that was admitted or resumed, if it was deferred."""
    if (found := getattr(req, _DEFERRED, None)) is None:
        return
    delattr(req, _DEFERRED)
    since, powers = found
    trace(req, "wait", time.perf_counter() - since, powers=", ".join(sorted(powers)))
