"""One engine's side of lending and borrowing KV memory: policy, blocks and messages together."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import IO, Any

from sgl_ext.config import Peer
from sgl_ext.engine import kv_vacate
from sgl_ext.engine.kv_resize import KVResizer
from sgl_ext.memory.lent import Extent, Lendable, map_memory
from sgl_ext.memory.mapping import PAGE
from sgl_ext.memory.slab import Slab
from sgl_ext.peer import directory
from sgl_ext.peer.link import Link
from sgl_ext.peer.master import Master
from sgl_ext.peer.messages import Keep, Lend
from sgl_ext.peer.regions import Region, Regions
from sgl_ext.peer.worker import Terms, Worker

logger = logging.getLogger(__name__)

_TREE = "UnifiedRadixCache"


def open_side(config: Peer, scheduler: Any, slab: Slab) -> PeerSide:
    """This process's side, as its section says.

    Raises:
        ExtError: the directory cannot be used, or SGLang's pool cannot change its size.
    """
    return (MasterSide if config.role == "master" else WorkerSide)(config, scheduler, slab)


class PeerSide:
    """What both sides share."""

    role: str

    def __init__(self, config: Peer, scheduler: Any, slab: Slab) -> None:
        self._scheduler, self._slab = scheduler, slab
        self._address = directory.address(config.directory)
        self._link: Link | None = None

    def step(self, running: Any) -> None:
        """Between two steps of the scheduler, with the batch that decodes."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What it has, for ``/server_info``."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the conversation."""
        if self._link is not None:
            self._link.close()

    def _evict(self, start: int, end: int) -> None:
        page = self._slab.layout.page
        kv_vacate.evict(self._scheduler.tree_cache, start * page, end * page)


class WorkerSide(PeerSide):
    """Lends the end of its slab; see :class:`~sgl_ext.peer.worker.Worker`."""

    role = "worker"

    def __init__(self, config: Peer, scheduler: Any, slab: Slab) -> None:
        super().__init__(config, scheduler, slab)
        allocator = scheduler.token_to_kv_pool_allocator
        self._first = allocator.groups.first
        self._resizer = KVResizer(scheduler, promised=allocator.groups.blocks)
        block = slab.layout.block_bytes
        least = (self._first + 1) * block
        if config.capacity is not None:
            least = max(least, slab.size - config.capacity)
        self._memory = Lendable(slab.mapping, slab.fd, slab.name, least, slab.size)
        terms = Terms(
            config.granularity, config.window, min(1.0, config.window), config.deadline,
            config.lease, config.keep,
        )  # fmt: skip
        self._worker = Worker(
            self._memory, self, terms, block=block, page=slab.layout.page, first=self._first,
            memory_page=PAGE,
        )  # fmt: skip
        self._link = Link("worker", self._address)

    @property
    def blocks(self) -> int:
        return self._resizer.blocks

    def vacate(self, blocks: int) -> int:
        end = self._first + self.blocks
        self._evict(end - blocks, end)
        return self.blocks - self._resizer.tail_free

    def shrink(self, blocks: int) -> bool:
        return self._resizer.shrink(blocks)

    def grow(self, blocks: int) -> None:
        self._resizer.grow(blocks)

    def step(self, running: Any) -> None:
        now = time.monotonic()
        if self._link is None:
            return
        for message in self._link.heard():
            if isinstance(message, Keep):
                self._worker.hear(message, now)
        self._worker.step(self._need(running), now)
        self._link.say([self._worker.message])

    def _need(self, running: Any) -> int:
        """Tokens that all requests have, or come to have."""
        scheduler = self._scheduler
        reqs = {id(req): req for req in (*running.reqs, *scheduler.waiting_queue)}
        if scheduler.chunked_req is not None:
            reqs[id(scheduler.chunked_req)] = scheduler.chunked_req
        page = self._slab.layout.page
        need = 0
        for req in reqs.values():
            if not req.finished():
                tokens = len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)
                # A request never fills its last page, and SGLang keeps one for each.
                need += (tokens // page + 2) * page
        return need

    def describe(self) -> dict[str, Any]:
        lending = self._worker.lending
        units = None
        if lending is not None:
            unit = lending.unit
            units = {"bytes": unit.size, "whole": unit.whole, "waste_bytes": unit.waste}
        return {
            "role": self.role,
            "lendable_bytes": self._memory.size,
            "lent_bytes": self._worker.lent,
            "used_bytes": self._worker.used,
            "retired_bytes": self._memory.retired,
            "unit": units,
            **vars(self._worker.counts),
        }


class MasterSide(PeerSide):
    """Has blocks in its workers' memory; see :class:`~sgl_ext.peer.master.Master`."""

    role = "master"

    def __init__(self, config: Peer, scheduler: Any, slab: Slab) -> None:
        super().__init__(config, scheduler, slab)
        self._lock: IO[str] = directory.lock(config.directory)
        self._resizer = KVResizer(scheduler)
        self._running: Any = None
        block = slab.layout.block_bytes
        self._master = Master(
            self, self, Regions(slab.own, slab.blocks, block, PAGE), block=block,
            lease=config.lease,
        )  # fmt: skip
        self.retracted = 0
        self._link = Link("master", self._address)

    def map(self, region: Region, pid: int, extents: Sequence[Extent]) -> None:
        map_memory(self._slab.mapping, region.offset, pid, extents)

    def unmap(self, region: Region) -> None:
        self._slab.mapping.drop(region.offset, region.size)

    def restore(self, start: int, end: int) -> None:
        self._resizer.restore(start, end)

    def withdraw(self, start: int, end: int) -> int:
        return self._resizer.withdraw(start, end)

    def vacate(self, start: int, end: int) -> None:
        page = self._slab.layout.page
        self.retracted += kv_vacate.retract(
            self._scheduler, self._running, start * page, end * page
        )
        self._evict(start, end)

    def step(self, running: Any) -> None:
        now = time.monotonic()
        if self._link is None:
            return
        for message in self._link.heard():
            if isinstance(message, Lend):
                self._master.hear(message, now)
        self._running = running
        self._master.step(now)
        self._running = None
        self._link.say(self._master.messages())

    def describe(self) -> dict[str, Any]:
        block = self._slab.layout.block_bytes
        return {
            "role": self.role,
            "borrowed_bytes": self._master.borrowed,
            "retracted": self.retracted,
            "workers": [
                {
                    "pid": loan.borrower.pid,
                    "lent_bytes": loan.borrower.size,
                    "used_bytes": loan.borrower.used,
                    "blocks": loan.borrower.used // block,
                    "refused": loan.borrower.refused,
                }
                for loan in self._master.loans
            ],
        }
