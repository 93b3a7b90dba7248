"""Spans of prompts that read workers' memory, in SGLang's traces of requests."""

from __future__ import annotations

import torch

from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler
from sgl_ext.engine.core.tracing import add_span, traced
from sgl_ext.engine.peer import vacate
from sgl_ext.engine.peer.stream import LayerStream


class LentReads:
    """Adds a span for each request of an extend batch that has KV in workers' memory.

    A span of a forward lasts as long as the forward has waited for the layer buffers; without
    buffers, attention reads the memory in place, and the span has no duration.

    Args:
        first: first slot in workers' memory.
        stream: the layer buffers; None without buffers.
    """

    def __init__(self, scheduler: Scheduler, first: int, stream: LayerStream | None) -> None:
        self._scheduler, self._first, self._stream = scheduler, first, stream
        self._waited = 0.0

    @property
    def _waited_seconds(self) -> float:
        return 0.0 if self._stream is None else self._stream.waited_seconds

    def begin(self) -> None:
        """Notes that a forward begins."""
        self._waited = self._waited_seconds

    def end(self, batch: ScheduleBatch) -> None:
        """Adds the spans of a forward that has ended."""
        if not batch.forward_mode.is_extend():
            return
        for req in filter(traced, batch.reqs):
            if lent := self._lent(req):
                waited = self._waited_seconds - self._waited
                add_span(req, "peer_read", waited, {"lent_tokens": lent})

    def _lent(self, req: Req) -> int:
        """Returns the number of the request's tokens that are in workers' memory."""
        if not req.kv.holds_kv:
            return 0
        return int(torch.count_nonzero(vacate.slots_of(self._scheduler, req) >= self._first))
