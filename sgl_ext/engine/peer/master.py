"""Master: an engine that serves requests in memory that workers lend it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO, Literal

from sgl_ext.config import Peer
from sgl_ext.engine.core.attention_backends import require_own
from sgl_ext.engine.core.sglang_types import ScheduleBatch, Scheduler
from sgl_ext.engine.peer import vacate
from sgl_ext.engine.peer.side import CLOSE_DEADLINE_S, PeerSide, SharedSlab
from sgl_ext.engine.peer.stream import LayerStream
from sgl_ext.errors import ExtError
from sgl_ext.memory.device_lent import map_device_memory
from sgl_ext.memory.gpus import unreachable
from sgl_ext.memory.lent import Extent, map_memory
from sgl_ext.memory.mapping import Mapping
from sgl_ext.peer import directory
from sgl_ext.peer.master import Master
from sgl_ext.peer.need import NeedWindow
from sgl_ext.peer.process import Identity, identity
from sgl_ext.peer.regions import Region, Regions
from sgl_ext.peer.vacating import Attempts


class MasterSide(PeerSide):
    """Side that uses blocks in workers' memory; see :class:`~sgl_ext.peer.master.Master`."""

    role: Literal["master", "worker"] = "master"

    def __init__(self, config: Peer, scheduler: Scheduler, slab: SharedSlab) -> None:
        super().__init__(config, scheduler, slab)
        self._lock: IO[str] = directory.lock(config.directory)
        self._own = self._resizer.blocks
        # Workers may soon lend reclaimed memory again: requests that need it are accepted so long.
        self._most = NeedWindow(self._waiting.patience)
        self._mapping, self._gpu = slab.mapping, slab.gpu
        self._refusals: dict[str, str] = {}
        """Answers of :meth:`refusal`, which do not change."""
        block = slab.layout.block_bytes
        self._master = Master(
            self, self, Regions(slab.own, slab.blocks, block, slab.memory_page), block=block,
            capacity=config.capacity or 0, lease=config.lease, identity=identity(),
        )  # fmt: skip
        self._attempts = Attempts()
        if config.stream != "direct":
            runner = scheduler.tp_worker.model_runner
            require_own(runner, slab.layout, 1.0, f"peer.stream {config.stream}")
            buffers = 1 if config.stream == "layer" else 2
            self._reserve(LayerStream.blocks(slab, buffers))
            pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
            self.stream = LayerStream(slab, pool, buffers, config.busy_rate, config.emulate)
        self._connect()

    def _reserve(self, blocks: int) -> None:
        """Takes the last own blocks from SGLang, for layer buffers (Eq. 5).

        Raises:
            ExtError: no request would fit the rest.
        """
        block, own = self._slab.layout.block_bytes, self._slab.own
        if blocks > self._resizer.removable:
            raise ExtError(
                f"peer.stream needs layer buffers of {blocks * block:,} B for peer.capacity, but "
                f"this engine has {self._own * block:,} B of KV memory of its own; lower "
                "peer.capacity, or raise --max-total-tokens"
            )
        self._resizer.withdraw(own - blocks, own)
        self._own = self._resizer.blocks

    def refusal(self, gpu: str) -> str:
        if gpu not in self._refusals:
            self._refusals[gpu] = self._refusal(gpu)
        return self._refusals[gpu]

    def _refusal(self, gpu: str) -> str:
        if gpu == self._gpu:
            return ""
        if gpu and self._gpu and self._slab.device is not None:
            return unreachable(self._slab.device, gpu)
        lent, own = (
            f"memory of the GPU {each}" if each else "host memory" for each in (gpu, self._gpu)
        )
        return (
            f"the worker lends {lent}, but this master has its KV in {own}; run both on GPUs, or "
            "both on the CPU"
        )

    def map(self, region: Region, worker: Identity, extents: Sequence[Extent]) -> None:
        if isinstance(self._mapping, Mapping):
            map_memory(self._mapping, region.offset, worker.pid, extents)
        else:
            map_device_memory(self._mapping, region.offset, worker.socket, extents)

    def unmap(self, region: Region) -> None:
        if self.stream is not None:
            self.stream.settle()
        self._streams.synchronize()  # a forward that meets unmapped memory ends the process
        self._mapping.drop(region.offset, region.size)

    def restore(self, start: int, end: int) -> None:
        self._resizer.restore(start, end)

    def withdraw(self, start: int, end: int) -> int:
        return self._resizer.withdraw(start, end)

    def vacate(self, start: int, end: int) -> None:
        if not self._attempts.due(start, end, self._holders(), self._now):
            return
        page = self._slab.layout.page
        slots = start * page, end * page
        self.out += vacate.retract(self._scheduler, self._running, *slots)
        self._evict(start, end, at_once=True)  # the worker waits
        self._attempts.record(start, end, self._holders(), self._now)

    def _holders(self) -> object:
        """Returns a value that changes when a request ends or cached blocks become evictable."""
        scheduler = self._scheduler
        reqs = [*self._running.reqs, scheduler.chunked_req]
        return [req and req.rid for req in reqs], scheduler.tree_cache.evictable_size()

    def step(self, running: ScheduleBatch) -> None:
        now = time.monotonic()
        self._tick(now)
        before = self._resizer.blocks
        self._running = running
        self._exchange(now)
        if self.stream is not None:
            self.stream.enabled = bool(self._master.borrowed)
            self.stream.worker_busy = self._master.worker_busy
        blocks = self._resizer.blocks
        self._retry_admission(running, before, blocks)
        if blocks < before or self._scheduler.chunked_req is not None:
            self.out += vacate.retract_what_does_not_fit(self._scheduler, running)
        self._most.add(blocks, self._awake)
        self._resizer.promise(self._most.largest(self._awake))
        self._put_aside("a peer has reclaimed the memory that it lent")

    def _exchange(self, now: float) -> None:
        for lend in self._link.received():
            self._master.receive(lend, now)
        self._master.step(now)
        self._link.publish(self._master.messages())

    def close(self) -> None:
        self._running = running = self._scheduler.running_batch
        self._master.close()
        end = time.monotonic() + CLOSE_DEADLINE_S
        while not running.reqs and self._master.granted and time.monotonic() < end:
            self._exchange(time.monotonic())
            time.sleep(0.01)
        super().close()

    def check_integrity(self) -> None:
        self._master.check_integrity()
        loans = [(loan, loan.region) for loan in self._master.loans if loan.region is not None]
        borrowed = sum(region.end - loan.first for loan, region in loans)
        returning = any(loan.returning for loan, _ in loans)  # some of the blocks are withdrawn
        blocks = self._resizer.blocks
        if blocks > self._own + borrowed or (blocks < self._own + borrowed and not returning):
            raise AssertionError(
                f"SGLang has {blocks} blocks, expected {self._own} own and {borrowed} borrowed ones"
            )

    def describe(self) -> dict[str, object]:
        block = self._slab.layout.block_bytes
        streamed = {}
        if self.stream is not None:
            streamed = {
                "buffer_bytes": self.stream.buffer_bytes,
                "stream_bytes": self.stream.forward_bytes,
                "stream_waited_seconds": self.stream.waited_seconds,
            }
        return {
            "role": self.role,
            **streamed,
            "borrowed_bytes": self._master.borrowed,
            "retracted": self.retracted,
            "protocol_error": self._link.protocol_error,
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
