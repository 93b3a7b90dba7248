"""One engine's side of lending and borrowing KV memory: policy, blocks and messages together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO, Any, Literal

import torch
import zmq

from sgl_ext.config import Peer
from sgl_ext.engine import kv_vacate
from sgl_ext.engine.kv_resize import KVResizer
from sgl_ext.engine.layer_stream import LayerStream
from sgl_ext.engine.refusing import refuse_waiting
from sgl_ext.errors import ExtError
from sgl_ext.memory.lent import Extent, Lendable, map_memory
from sgl_ext.memory.mapping import PAGE
from sgl_ext.memory.slab import Slab
from sgl_ext.peer import directory
from sgl_ext.peer.link import Link
from sgl_ext.peer.master import Master
from sgl_ext.peer.need import NeedWindow
from sgl_ext.peer.regions import Region, Regions
from sgl_ext.peer.worker import Terms, Worker


def open_side(config: Peer, scheduler: Any, slab: Slab) -> PeerSide:
    """This process's side, as its section says.

    Raises:
        ExtError: the directory cannot be used, or SGLang's pool cannot change its size.
    """
    return (MasterSide if config.role == "master" else WorkerSide)(config, scheduler, slab)


class PeerSide:
    """What both sides share."""

    role: Literal["master", "worker"]
    stream: LayerStream | None = None
    """A master's layer buffers, if it has any."""
    aside: Sequence[Any] = ()
    """Requests that wait for memory, and are not in SGLang's queue while it plans a step."""
    out: Sequence[Any] = ()
    """Those that gave way in this step, which are queued when it has been planned."""

    def __init__(self, config: Peer, scheduler: Any, slab: Slab) -> None:
        self._scheduler, self._slab = scheduler, slab
        self._address = directory.address(config.directory)
        self._running: Any = None
        self._unfit: dict[str, float] = {}
        """Ids of requests that memory is missing for, and since when."""
        self._patience = config.deadline + config.lease
        """Seconds that they wait for it."""

    def step(self, running: Any) -> None:
        """Between two steps of the scheduler, with the batch that decodes."""
        raise NotImplementedError

    def planned(self) -> None:
        """The next step has been planned."""

    def describe(self) -> dict[str, Any]:
        """What it has, for ``/server_info``."""
        raise NotImplementedError

    def _refuse_what_cannot_come(self, now: float, why: str) -> None:
        """Requests that were accepted when there was more memory wait for it, but not for ever.

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

    def _meet(self) -> None:
        """Opens the conversation, when all else has been made."""
        self._link = Link(self.role, self._address)
        poller = getattr(getattr(self._scheduler, "idle_sleeper", None), "poller", None)
        if poller is not None:  # a scheduler with nothing to do sleeps for up to a second
            poller.register(self._link.news, zmq.POLLIN)

    def _evict(self, start: int, end: int) -> None:
        page = self._slab.layout.page
        kv_vacate.evict(self._scheduler.tree_cache, start * page, end * page)


class WorkerSide(PeerSide):
    """Lends the end of its slab; see :class:`~sgl_ext.peer.worker.Worker`."""

    role: Literal["master", "worker"] = "worker"

    def __init__(self, config: Peer, scheduler: Any, slab: Slab) -> None:
        super().__init__(config, scheduler, slab)
        allocator = scheduler.token_to_kv_pool_allocator
        self._first = allocator.groups.first
        self._resizer = KVResizer(scheduler)
        self._resizer.promise(allocator.groups.blocks)
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
        self._meet()

    @property
    def blocks(self) -> int:
        return self._resizer.blocks

    def vacate(self, blocks: int) -> int:
        end = self._first + self.blocks
        # What lies in front of a request's last block stays cached.
        self._evict(max(end - blocks, self._held(self._running)), end)
        return self.blocks - self._resizer.tail_free

    def _held(self, running: Any) -> int:
        """End of the blocks that requests hold."""
        table = self._scheduler.req_to_token_pool.req_to_token
        ends = [0]
        for req in self._requests(running):
            if req.kv.holds_kv and req.kv.kv_allocated_len:
                slots = table[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
                ends.append(int(slots.max()) // self._slab.layout.page + 1)
        return max(ends)

    def shrink(self, blocks: int) -> bool:
        return self._resizer.shrink(blocks)

    def grow(self, blocks: int) -> None:
        self._resizer.grow(blocks)

    def step(self, running: Any) -> None:
        now = time.monotonic()
        for keep in self._link.heard():
            self._worker.hear(keep, now)
        self._running = running
        self._worker.step(self._need(running), now)
        self._running = None
        self._link.say([self._worker.message])
        self._refuse_what_cannot_come(now, "a peer has not given back what it was lent")

    def _need(self, running: Any) -> int:
        """Tokens that all requests have, or come to have."""
        page = self._slab.layout.page
        need = 0
        for req in self._requests(running):
            if not req.finished():
                tokens = len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)
                # A request never fills its last page, and SGLang keeps one for each.
                need += (tokens // page + 2) * page
        return need

    def _requests(self, running: Any) -> Sequence[Any]:
        scheduler = self._scheduler
        reqs = {id(req): req for req in (*running.reqs, *scheduler.waiting_queue)}
        if scheduler.chunked_req is not None:
            reqs[id(scheduler.chunked_req)] = scheduler.chunked_req
        return list(reqs.values())

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
            "refused": self._worker.refused,
            "misunderstood": self._link.strange,
            "unit": units,
            **vars(self._worker.counts),
        }


def _require_native(slab: Slab) -> None:
    from sgl_ext.engine.cpu.native_attention import NativeAttention, native_attention

    layout = slab.layout
    shape = (1, layout.kv_heads, layout.head_dim)
    sample = torch.empty(shape, dtype=getattr(torch, layout.dtype))
    if native_attention() is None or not NativeAttention.serves(sample, sample, sample, 1.0):
        raise ExtError(
            f"the compiled attention does not serve {layout.dtype} with heads of "
            f"{layout.head_dim} here, and torch's knows no layer buffers; set stream to direct"
        )


class MasterSide(PeerSide):
    """Has blocks in its workers' memory; see :class:`~sgl_ext.peer.master.Master`."""

    role: Literal["master", "worker"] = "master"

    def __init__(self, config: Peer, scheduler: Any, slab: Slab) -> None:
        super().__init__(config, scheduler, slab)
        self._lock: IO[str] = directory.lock(config.directory)
        self._resizer = KVResizer(scheduler)
        self.out: list[Any] = []
        # What a worker has taken back for a moment comes again: requests wait for it so long.
        self._most = NeedWindow(self._patience)
        block = slab.layout.block_bytes
        self._master = Master(
            self, self, Regions(slab.own, slab.blocks, block, PAGE), block=block,
            capacity=config.capacity or 0, lease=config.lease,
        )  # fmt: skip
        self.retracted = 0
        if config.stream != "direct":
            _require_native(slab)
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
        page = self._slab.layout.page
        slots = start * page, end * page
        self.out += kv_vacate.retract(self._scheduler, self._running, *slots)
        self._evict(start, end)

    def step(self, running: Any) -> None:
        now = time.monotonic()
        for lend in self._link.heard():
            self._master.hear(lend, now)
        before = self._resizer.blocks
        self._running = running
        self._master.step(now)
        self._running = None
        if self.stream is not None:
            self.stream.enabled = bool(self._master.borrowed)
            self.stream.sparing = self._master.sparing
        blocks = self._resizer.blocks
        if blocks < before:
            self.out += kv_vacate.retract_what_does_not_fit(self._scheduler, running)
        self._most.add(blocks, now)
        self._resizer.promise(self._most.largest(now))
        self._link.say(self._master.messages())
        self._refuse_what_cannot_come(now, "a peer has taken back what it lent")
        self._put_aside()

    def _put_aside(self) -> None:
        """Who waits for memory that is not there keeps nobody waiting that needs none of it."""
        if self._unfit:
            queue = self._scheduler.waiting_queue
            self.aside = [req for req in queue if req.rid in self._unfit]
            self._scheduler.waiting_queue = [req for req in queue if req.rid not in self._unfit]

    def planned(self) -> None:
        if self.aside:
            self._scheduler.waiting_queue = [*self.aside, *self._scheduler.waiting_queue]
            self.aside = ()
        self.retracted += len(self.out)
        for req in self.out:
            self._scheduler._add_request_to_queue(req, is_retracted=True)
        self.out.clear()

    def describe(self) -> dict[str, Any]:
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
