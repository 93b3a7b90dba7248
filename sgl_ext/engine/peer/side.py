"""One engine's side of lending and borrowing KV memory: policy, blocks and messages together.

What both roles (:mod:`~sgl_ext.engine.peer.roles`) share: who waits for memory, and how they speak.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import zmq

from sgl_ext.config import Peer
from sgl_ext.engine.core.requests import refuse_waiting
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler
from sgl_ext.engine.kv import vacate as kv_vacate
from sgl_ext.engine.peer.metrics import PeerMetrics
from sgl_ext.engine.peer.stream import LayerStream
from sgl_ext.memory.slab import Slab
from sgl_ext.peer import directory
from sgl_ext.peer.link import Link

LAST_WORD_S = 1.0
"""At most that a side takes to leave."""


class PeerSide:
    """What both sides share."""

    role: Literal["master", "worker"]
    stream: LayerStream | None = None
    """A master's layer buffers, if it has any."""
    aside: Sequence[Req] = ()
    """Requests that wait for memory, and are not in SGLang's queue while it plans a step."""
    out: Sequence[Req] = ()
    """Those that gave way in this step, which are queued when it has been planned."""

    def __init__(self, config: Peer, scheduler: Scheduler, slab: Slab) -> None:
        self._scheduler, self._slab = scheduler, slab
        self._address = directory.address(config.directory)
        self._running = scheduler.running_batch
        """The batch that decodes, as of the current step."""
        self._unfit: dict[str, float] = {}
        """Ids of requests that memory is missing for, and since when."""
        self._patience = config.deadline + config.lease
        """Seconds that they wait for it."""
        self._metrics: PeerMetrics | None = None

    def step(self, running: ScheduleBatch) -> None:
        """Between two steps of the scheduler, with the batch that decodes."""
        raise NotImplementedError

    def planned(self) -> None:
        """The next step has been planned."""
        if self.aside:
            self._scheduler.waiting_queue = [*self.aside, *self._scheduler.waiting_queue]
            self.aside = ()

    def measure(self) -> None:
        """Brings ``/metrics`` up to date."""
        if self._metrics is None:
            self._metrics = PeerMetrics(self.describe())
        if self._metrics.due:
            self._metrics.update(self.describe())

    def describe(self) -> dict[str, Any]:
        """What it has, for ``/server_info``."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the others, when nothing is computed any more: they need not find out."""
        self._link.close(LAST_WORD_S)

    def _put_aside(self, now: float, why: str) -> None:
        """Requests that were accepted when there was more memory wait for it, but not for ever, and
        keep nobody waiting who fits.

        Args:
            why: there is less.
        """
        scheduler = self._scheduler
        allocator = scheduler.token_to_kv_pool_allocator
        waiting = scheduler.waiting_queue
        unfit = [req for req in waiting if not kv_vacate.fits(req, allocator)]
        self._unfit = {req.rid: self._unfit.get(req.rid, now) for req in unfit}
        for req in unfit:
            if now - self._unfit[req.rid] > self._patience:
                del self._unfit[req.rid]
                refuse_waiting(
                    scheduler,
                    req,
                    f"The request needs more KV memory than the {allocator.size} tokens that "
                    f"are left: {why}. Retry later.",
                )
        if self._unfit:
            waiting = scheduler.waiting_queue
            self.aside = [req for req in waiting if req.rid in self._unfit]
            scheduler.waiting_queue = [req for req in waiting if req.rid not in self._unfit]

    def _look_again(self, running: ScheduleBatch, before: int, blocks: int) -> None:
        """SGLang, that found no room for a request, looks again only when another one has ended."""
        if blocks > before:
            running.batch_is_full = False

    def _meet(self) -> None:
        """Opens the conversation, when all else has been made."""
        self._link = Link(self.role, self._address)
        poller = getattr(getattr(self._scheduler, "idle_sleeper", None), "poller", None)
        if poller is not None:  # a scheduler with nothing to do sleeps for up to a second
            poller.register(self._link.news, zmq.POLLIN)

    def _evict(self, start: int, end: int) -> None:
        page = self._slab.layout.page
        kv_vacate.evict(self._scheduler.tree_cache, start * page, end * page)
