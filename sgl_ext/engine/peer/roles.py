"""The two sides of lending and borrowing: worker and master."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO, Any, Literal

from sgl_ext.config import Peer
from sgl_ext.engine.core.attention_backends import require_own
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler
from sgl_ext.engine.kv import vacate as kv_vacate
from sgl_ext.engine.kv.resize import KVResizer
from sgl_ext.engine.peer.side import LAST_WORD_S, PeerSide
from sgl_ext.engine.peer.stream import LayerStream
from sgl_ext.memory.lent import Extent, Lendable, map_memory
from sgl_ext.memory.mapping import PAGE
from sgl_ext.memory.slab import Slab
from sgl_ext.peer import directory
from sgl_ext.peer.master import Master
from sgl_ext.peer.need import NeedWindow
from sgl_ext.peer.regions import Region, Regions
from sgl_ext.peer.worker import Terms, Worker

_STEP_S = 1.0
"""Maximum time between two steps, in seconds, that counts as running; after a longer time the
process was stopped or idle."""
_AGAIN_S = 0.1
"""Time in seconds after which vacating a range is tried again although its holders have not
changed."""


def open_side(config: Peer, scheduler: Scheduler, slab: Slab) -> PeerSide:
    """Returns a new side for this process, by the configured role.

    Raises:
        ExtError: the directory cannot be used, or SGLang's pool cannot change its size.
    """
    return (MasterSide if config.role == "master" else WorkerSide)(config, scheduler, slab)


class WorkerSide(PeerSide):
    """Side that lends the end of its slab; see :class:`~sgl_ext.peer.worker.Worker`."""

    role: Literal["master", "worker"] = "worker"

    def __init__(self, config: Peer, scheduler: Scheduler, slab: Slab) -> None:
        super().__init__(config, scheduler, slab)
        allocator: Any = scheduler.token_to_kv_pool_allocator
        self._first = allocator.groups.first
        self._resizer = KVResizer(scheduler)
        self._resizer.promise(allocator.groups.blocks)
        block = slab.layout.block_bytes
        least = (self._first + self._resizer.least) * block
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
        self._meet()

    @property
    def blocks(self) -> int:
        return self._resizer.blocks

    def removable(self, blocks: int) -> int:
        unheld = self._first + self.blocks - self._held(self._running)
        return min(blocks, self._resizer.removable, unheld)

    def vacate(self, blocks: int) -> int:
        end = self._first + self.blocks
        self._evict(end - blocks, end)
        return self.blocks - self._resizer.tail_free

    def _held(self, running: ScheduleBatch) -> int:
        """Returns the end of the blocks that requests hold."""
        table = self._scheduler.req_to_token_pool.req_to_token
        ends = [self._first]
        for req in self._requests(running):
            if req.kv.holds_kv and req.kv.kv_allocated_len:
                slots = table[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
                ends.append(int(slots.max()) // self._slab.layout.page + 1)
        return max(ends)

    def shrink(self, blocks: int) -> bool:
        return self._resizer.shrink(blocks)

    def grow(self, blocks: int) -> None:
        self._resizer.grow(blocks)

    def step(self, running: ScheduleBatch) -> None:
        now = time.monotonic()
        for keep in self._link.heard():
            self._worker.hear(keep, now)
        before = self.blocks
        self._running = running
        self._worker.step(self._need(running), now)
        self._look_again(running, before, self.blocks)
        self._link.say([self._worker.message])
        self._put_aside(now, "a peer has not returned the memory that it was lent")

    def close(self) -> None:
        self._worker.close()
        self._worker.step(0, time.monotonic())
        self._link.say([self._worker.message])
        super().close()

    def _need(self, running: ScheduleBatch) -> int:
        """Returns the tokens that all requests together have or may come to have."""
        page = self._slab.layout.page
        need = 0
        for req in self._requests(running):
            if not req.finished():
                tokens = len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)
                # One page for the last tokens, and one that SGLang reserves for each request.
                need += (tokens // page + 2) * page
        return need

    def _requests(self, running: ScheduleBatch) -> Sequence[Req]:
        scheduler = self._scheduler
        reqs = {id(req): req for req in (*running.reqs, *scheduler.waiting_queue)}
        if scheduler.chunked_req is not None:
            reqs[id(scheduler.chunked_req)] = scheduler.chunked_req
        return list(reqs.values())

    def describe(self) -> dict[str, object]:
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
            "refused": self._worker.refused or self._link.refused,
            "misunderstood": self._link.strange,
            "unit": units,
            **vars(self._worker.counts),
        }


class MasterSide(PeerSide):
    """Side that uses blocks in workers' memory; see :class:`~sgl_ext.peer.master.Master`."""

    role: Literal["master", "worker"] = "master"

    def __init__(self, config: Peer, scheduler: Scheduler, slab: Slab) -> None:
        super().__init__(config, scheduler, slab)
        self._lock: IO[str] = directory.lock(config.directory)
        self._resizer = KVResizer(scheduler)
        self.out: list[Req] = []
        # Workers may soon lend reclaimed memory again: requests that need it are accepted so long.
        self._most = NeedWindow(self._patience)
        block = slab.layout.block_bytes
        self._master = Master(
            self, self, Regions(slab.own, slab.blocks, block, PAGE), block=block,
            capacity=config.capacity or 0, lease=config.lease,
        )  # fmt: skip
        self.retracted = 0
        self._now = time.monotonic()
        self._awake = 0.0
        # Time of the last attempt to vacate each range, and the holders after it.
        self._stayed: dict[tuple[int, int], tuple[float, object]] = {}
        if config.stream != "direct":
            runner = scheduler.tp_worker.model_runner
            require_own(runner, slab.layout, 1.0, f"peer.stream {config.stream}")
            buffers = 1 if config.stream == "layer" else 2
            pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
            self.stream = LayerStream(slab, pool, buffers, config.busy_rate, config.emulate)
        self._meet()

    def map(self, region: Region, pid: int, extents: Sequence[Extent]) -> None:
        map_memory(self._slab.mapping, region.offset, pid, extents)

    def unmap(self, region: Region) -> None:
        if self.stream is not None:
            self.stream.settle()
        self._slab.mapping.drop(region.offset, region.size)

    def restore(self, start: int, end: int) -> None:
        self._resizer.restore(start, end)

    def withdraw(self, start: int, end: int) -> int:
        return self._resizer.withdraw(start, end)

    def vacate(self, start: int, end: int) -> None:
        recent = {at: each for at, each in self._stayed.items() if self._now - each[0] < _AGAIN_S}
        if (seen := recent.get((start, end))) is not None and seen[1] == self._holders():
            return
        page = self._slab.layout.page
        slots = start * page, end * page
        self.out += kv_vacate.retract(self._scheduler, self._running, *slots)
        self._evict(start, end)
        self._stayed = recent | {(start, end): (self._now, self._holders())}

    def _holders(self) -> object:
        """Returns a value that changes when a request ends or cached blocks become evictable."""
        scheduler = self._scheduler
        reqs = [*self._running.reqs, scheduler.chunked_req]
        return [req and req.rid for req in reqs], scheduler.tree_cache.evictable_size()

    def step(self, running: ScheduleBatch) -> None:
        now = time.monotonic()
        # Time in which the process was stopped does not count as waiting.
        self._awake += min(now - self._now, _STEP_S)
        self._now = now
        before = self._resizer.blocks
        self._running = running
        self._talk(now)
        if self.stream is not None:
            self.stream.enabled = bool(self._master.borrowed)
            self.stream.sparing = self._master.sparing
        blocks = self._resizer.blocks
        self._look_again(running, before, blocks)
        if blocks < before or self._scheduler.chunked_req is not None:
            self.out += kv_vacate.retract_what_does_not_fit(self._scheduler, running)
        self._most.add(blocks, self._awake)
        self._resizer.promise(self._most.largest(self._awake))
        self._put_aside(now, "a peer has reclaimed the memory that it lent")

    def _talk(self, now: float) -> None:
        for lend in self._link.heard():
            self._master.hear(lend, now)
        self._master.step(now)
        self._link.say(self._master.messages())

    def planned(self) -> None:
        super().planned()
        self.retracted += len(self.out)
        for req in self.out:
            self._scheduler._add_request_to_queue(req, is_retracted=True)
        self.out.clear()

    def close(self) -> None:
        self._running = running = self._scheduler.running_batch
        self._master.close()
        end = time.monotonic() + LAST_WORD_S
        while not running.reqs and self._master.granted and time.monotonic() < end:
            self._talk(time.monotonic())
            time.sleep(0.01)
        super().close()

    def describe(self) -> dict[str, object]:
        block = self._slab.layout.block_bytes
        streamed = {}
        if self.stream is not None:
            streamed = {
                "stream_bytes": self.stream.forward_bytes,
                "stream_waited_seconds": self.stream.waited_seconds,
            }
        return {
            "role": self.role,
            **streamed,
            "borrowed_bytes": self._master.borrowed,
            "retracted": self.retracted,
            "misunderstood": self._link.strange,
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
