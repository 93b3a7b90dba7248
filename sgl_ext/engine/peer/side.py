"""Common part of both sides of lending: requests that wait for memory, link and metrics.

A side of an engine connects policy, blocks and messages; see :mod:`~sgl_ext.engine.peer.worker`
and :mod:`~sgl_ext.engine.peer.master`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Literal

import zmq

from sgl_ext.config import Peer
from sgl_ext.engine.core.metrics import Metrics
from sgl_ext.engine.core.requests import arrival, refuse_waiting
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler
from sgl_ext.engine.core.tracing import trace
from sgl_ext.engine.kv.resize import KVResizer
from sgl_ext.engine.peer import vacate
from sgl_ext.engine.peer.metrics import PeerMetrics
from sgl_ext.engine.peer.stream import LayerStream
from sgl_ext.memory.device_slab import SharedDeviceSlab
from sgl_ext.memory.slab import HostSlab
from sgl_ext.memory.streams import streams_of
from sgl_ext.peer import directory
from sgl_ext.peer.link import Link
from sgl_ext.peer.waiting import Waiting

SharedSlab = HostSlab | SharedDeviceSlab
"""Slab of an engine with peers"""
_STEP_S = 1.0
"""Longest time of a step that counts as waiting, in seconds."""
CLOSE_DEADLINE_S = 1.0
"""Deadline in seconds for the last messages of a side that closes, and for the end of its link."""


class PeerSide:
    """Base class of both sides."""

    role: Literal["master", "worker"]
    stream: LayerStream | None = None
    """Layer buffers of a master; None if there are none."""
    aside: Sequence[Req] = ()
    """Requests that wait for memory; they are not in SGLang's queue while it plans a step."""

    def __init__(self, config: Peer, scheduler: Scheduler, slab: SharedSlab) -> None:
        self._scheduler, self._slab = scheduler, slab
        self._streams = streams_of(slab.device, None)
        self._resizer = KVResizer(scheduler, self._streams)
        self._address = directory.address(config.directory)
        self._running = scheduler.running_batch
        """The batch that decodes, as of the current step."""
        self.out: list[Req] = []
        """Requests that were retracted in this step; they are queued when it has been planned."""
        self.retracted = 0
        """Number of requests retracted so far."""
        self._waiting = Waiting(config.deadline + config.lease)
        self._now = time.monotonic()
        """Start of the current step."""
        self._awake = 0.0
        """Seconds in which this process took steps."""
        self._metrics: PeerMetrics | None = None

    def step(self, running: ScheduleBatch) -> None:
        """Exchanges messages and adapts the pool between two steps of the scheduler.

        Args:
            running: the batch that decodes.
        """
        raise NotImplementedError

    def planned(self) -> None:
        """Queues requests that were set aside or retracted; called when the next step has been
        planned."""
        if self.aside:
            waiting = self._scheduler.waiting_queue
            self._scheduler.waiting_queue = [*heapq.merge(self.aside, waiting, key=arrival)]
            self.aside = ()
        self.retracted += len(self.out)
        for req in self.out:
            self._scheduler._add_request_to_queue(req, is_retracted=True)
        self.out.clear()

    def measure(self, metrics: Metrics) -> None:
        """Updates ``/metrics`` if an update is due."""
        if self._metrics is None:
            self._metrics = PeerMetrics(metrics, self.describe())
        if self._metrics.due:
            self._metrics.update(self.describe())

    def describe(self) -> dict[str, object]:
        """Returns the state of this side, for ``/server_info``."""
        raise NotImplementedError

    def close(self) -> None:
        """Sends the last messages and closes the link, so that the other sides need not wait for
        the lease. No forward may run any more."""
        self._link.close(CLOSE_DEADLINE_S)

    def check_integrity(self) -> None:
        """Checks this side's loans and blocks, between two steps; raises AssertionError."""
        raise NotImplementedError

    def _tick(self, now: float) -> None:
        """Begins a step. Time in which the process was stopped or paused is not time awake."""
        self._awake += min(now - self._now, _STEP_S)
        self._now = now

    def _put_aside(self, why: str) -> None:
        """Sets aside waiting requests that do not fit any more, so that others are admitted.

        Such requests were accepted when there was more memory. Those that have waited for
        ``deadline`` + ``lease`` while this process took steps, in which time peers return memory,
        get shorter answers, or are refused with 503 if they do not fit even so.

        Args:
            why: reason why there is less memory.
        """
        scheduler = self._scheduler
        allocator = scheduler.token_to_kv_pool_allocator
        unfit = {req.rid: req for req in scheduler.waiting_queue if not vacate.fits(req, allocator)}
        expired = self._waiting.expired(unfit, self._awake)
        if ended := self._waiting.ended:
            for req in scheduler.waiting_queue:
                if req.rid in ended:
                    trace(req, "peer_wait", ended[req.rid])
        for rid in expired:
            vacate.clip(req := unfit.pop(rid), allocator)
            if not vacate.fits(req, allocator):
                refuse_waiting(
                    scheduler,
                    req,
                    f"The request needs more KV memory than the {allocator.size} tokens that are "
                    f"available: {why}. Retry later.",
                )
        if unfit:
            waiting = scheduler.waiting_queue
            self.aside = [req for req in waiting if req.rid in unfit]
            scheduler.waiting_queue = [req for req in waiting if req.rid not in unfit]

    def _retry_admission(self, running: ScheduleBatch, before: int, blocks: int) -> None:
        """Lets SGLang look for room again if the pool has grown; it does so by itself only when a
        request has ended."""
        if blocks > before:
            running.batch_is_full = False

    def clear(self, start: int, end: int) -> None:
        """Clears blocks of a device that another process has used.

        Some attention kernels multiply masked values by zero, and their bits may be those of NaN.
        """
        if isinstance(self._slab, SharedDeviceSlab):
            block = self._slab.layout.block_bytes
            self._slab.zero(start * block, (end - start) * block)

    def _connect(self) -> None:
        """Opens the link; called when all other parts of this side exist."""
        self._link = Link(self.role, self._address)
        poller = getattr(getattr(self._scheduler, "idle_sleeper", None), "poller", None)
        if poller is not None:  # an idle scheduler, which sleeps for up to a second
            poller.register(self._link.news, zmq.POLLIN)

    def _evict(self, start: int, end: int, *, at_once: bool) -> None:
        page = self._slab.layout.page
        vacate.evict(self._scheduler.tree_cache, start * page, end * page, at_once=at_once)
