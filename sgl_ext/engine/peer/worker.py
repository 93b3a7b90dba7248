"""Worker: an engine that lends the end of its slab, and reclaims it when it needs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, cast

import torch

from sgl_ext.config import Peer
from sgl_ext.engine.core.requests import reserved
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler
from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.engine.kv.indices import on_host
from sgl_ext.engine.peer import vacate
from sgl_ext.engine.peer.side import PeerSide, SharedSlab
from sgl_ext.memory.descriptors import DescriptorServer
from sgl_ext.memory.device_lent import DeviceLendable
from sgl_ext.memory.device_slab import SharedDeviceSlab
from sgl_ext.memory.lent import Lendable
from sgl_ext.peer.process import identity
from sgl_ext.peer.worker import Terms, Worker


class WorkerSide(PeerSide):
    """Side that lends the end of its slab; see :class:`~sgl_ext.peer.worker.Worker`."""

    role: Literal["master", "worker"] = "worker"

    def __init__(self, config: Peer, scheduler: Scheduler, slab: SharedSlab) -> None:
        super().__init__(config, scheduler, slab)
        self._resizer.promise(self._resizer.blocks)
        # The resizer has checked the type.
        allocator = cast(BlockGroupAllocator, scheduler.token_to_kv_pool_allocator)
        self._first = allocator.groups.first
        block = slab.layout.block_bytes
        least = (self._first + self._resizer.least) * block
        name = identity()
        self._descriptors: DescriptorServer | None = None
        if isinstance(slab, SharedDeviceSlab):
            # A piece that begins before the end of the own blocks is lent as a whole.
            end = -(-slab.size // slab.piece) * slab.piece
            start = max(least, end - config.capacity) if config.capacity is not None else least
            pieces = DeviceLendable(slab.mapping, start, slab.size, self._streams, slab.zero)
            self._descriptors = DescriptorServer(name.socket, pieces.descriptor)
            self._memory: Lendable | DeviceLendable = pieces
        else:
            if config.capacity is not None:
                least = max(least, slab.size - config.capacity)
            self._memory = Lendable(slab.mapping, slab.fd, slab.name, least, slab.size)
        terms = Terms(
            config.granularity, config.window, min(1.0, config.window), config.deadline,
            config.lease, config.keep,
        )  # fmt: skip
        self._worker = Worker(
            self._memory, self, terms, block=block, page=slab.layout.page, first=self._first,
            memory_page=slab.memory_page, identity=name, gpu=slab.gpu,
        )  # fmt: skip
        self._connect()

    @property
    def blocks(self) -> int:
        return self._resizer.blocks

    def removable(self, blocks: int) -> int:
        if self._scheduler.chunked_req is not None:
            # Its chunks may be linked from KV that other requests do not hold. A part for which
            # there is no memory ends the scheduler.
            return 0
        unheld = self._first + self.blocks - self._held(self._running)
        return min(blocks, self._resizer.removable, unheld)

    def vacate(self, blocks: int) -> int:
        end = self._first + self.blocks
        self._evict(end - blocks, end, at_once=False)  # nobody waits for the memory
        return self.blocks - self._resizer.tail_free

    def _held(self, running: ScheduleBatch) -> int:
        """Returns the end of the blocks that requests hold; waits once for all of them."""
        highest = [
            vacate.slots_of(self._scheduler, req).max()
            for req in self._requests(running)
            if req.kv.holds_kv and req.kv.kv_allocated_len
        ]
        if not highest:
            return self._first
        return int(on_host(torch.stack(highest)).max()) // self._slab.layout.page + 1

    def shrink(self, blocks: int) -> bool:
        return self._resizer.shrink(blocks)

    def grow(self, blocks: int) -> None:
        start = self._first + self.blocks
        self.clear(start, start + blocks)
        self._resizer.grow(blocks)

    def step(self, running: ScheduleBatch) -> None:
        now = time.monotonic()
        self._tick(now)
        for keep in self._link.received():
            self._worker.receive(keep, now)
        before = self.blocks
        self._running = running
        self._worker.step(self._need(running), now)
        self._retry_admission(running, before, self.blocks)
        if self.blocks < before or self._scheduler.chunked_req is not None:
            self.out += vacate.retract_what_does_not_fit(self._scheduler, running)
        self._link.publish([self._worker.message])
        self._put_aside("a peer has not returned the memory that it was lent")

    def close(self) -> None:
        self._worker.close()
        self._worker.step(0, time.monotonic())
        self._link.publish([self._worker.message])
        super().close()
        if self._descriptors is not None:
            self._descriptors.close()

    def check_integrity(self) -> None:
        self._worker.check_integrity()

    def _need(self, running: ScheduleBatch) -> int:
        """Returns the tokens that all requests together have, and those that SGLang reserves."""
        page = self._slab.layout.page
        need = 0
        for req in self._requests(running):
            if not req.finished():
                beams = 1 if req.beam_group is None else req.beam_group.beam_width
                new = beams * (len(req.output_ids) + reserved(req))
                tokens = len(req.origin_input_ids) + new
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
            "protocol_error": self._link.protocol_error,
            "unit": units,
            **vars(self._worker.counts),
        }
