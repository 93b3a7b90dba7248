"""Spans of forwards that read stored contexts, in SGLang's traces of requests."""

from __future__ import annotations

from collections import Counter

from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.clusters.metrics import BLOCKS
from sgl_ext.engine.core.sglang_types import ScheduleBatch
from sgl_ext.engine.core.tracing import EACH_STEP, add_span, traced


class StoredReads:
    """Adds a span for each traced request of a forward that follows stored contexts.

    The span lasts as long as the forward has waited for blocks of the request's contexts, and says
    how many blocks were read when they were wanted, were prefetched, or were in memory. Requests
    that follow the same context share its reads.
    """

    def __init__(self, stored: StoredContexts) -> None:
        self._stored = stored
        self._before: dict[str, Counter[str]] = {}
        """Costs of a request's contexts when the forward began, by request id."""

    def begin(self, batch: ScheduleBatch) -> None:
        """Notes that a forward begins."""
        self._before = {}
        for req in filter(traced, batch.reqs):
            if (follower := self._stored.follower(req.rid)) is not None:
                self._before[req.rid] = self._stored.costs(follower)

    def end(self, batch: ScheduleBatch) -> None:
        """Adds the spans of a forward that has ended."""
        before, self._before = self._before, {}
        for req in batch.reqs if before else ():
            follower = self._stored.follower(req.rid)
            if req.rid in before and follower is not None:
                found = self._stored.costs(follower)
                found.subtract(before[req.rid])
                blocks = {name: found[name] for name in BLOCKS}
                add_span(req, "clusters_read", found["fetch"], blocks, level=EACH_STEP)
