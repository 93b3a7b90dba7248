"""Lending of a simulated engine's memory: the worker's policy and blocks, and a master.

The master has no requests: kernels on a stream of its own use all that it has borrowed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import torch
from simulated_device import Range
from simulated_engine import PAGE, PIECE, SimulatedEngine, resizer
from simulated_streams import SimulatedStreams

from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.memory.cuda_mapping import CudaMapping
from sgl_ext.memory.descriptors import DescriptorServer
from sgl_ext.memory.device_lent import DeviceLendable, map_device_memory
from sgl_ext.memory.lent import Extent
from sgl_ext.memory.streams import Streams
from sgl_ext.peer.master import Master
from sgl_ext.peer.process import Identity, identity
from sgl_ext.peer.regions import Region, Regions
from sgl_ext.peer.worker import Terms, Worker

_BLOCK = 1 << 16
"""Bytes of a block of the master"""
_OWN, _BEYOND = 32, 5 * 32
"""Blocks of the master, which has only addresses for both"""
_TERMS = Terms("block", window=0.5, interval=0.5, deadline=1e6, lease=1e6)


class _Borrowing(Streams):
    """The master's stream; it does not see those of the worker."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self._streams = streams

    def synchronize(self) -> None:
        self._streams.release()
        self._streams.device.synchronize(stream=self._streams.borrower)


class SimulatedMaster:
    """Master that borrows from one worker, with addresses and blocks of its own."""

    def __init__(self, streams: SimulatedStreams, library: str) -> None:
        self._streams, self._waits = streams, _Borrowing(streams)
        self.mapping = CudaMapping(0, (_OWN + _BEYOND) * _BLOCK, library=library)
        allocator = BlockGroupAllocator(
            (_OWN - 1) * PAGE, PAGE, torch.float16, "cpu", None, False, expected_tokens=PAGE,
            beyond=_BEYOND,
        )  # fmt: skip
        self._resizer = resizer(allocator, self._waits)
        self.master = Master(
            self, self, Regions(_OWN, _OWN + _BEYOND, _BLOCK, PIECE), block=_BLOCK,
            capacity=4 * PIECE, lease=1e6, identity=identity(),
        )  # fmt: skip

    def refusal(self, gpu: str) -> str:
        return "" if gpu == "gpu" else "memory of another GPU"

    def map(self, region: Region, worker: Identity, extents: Sequence[Extent]) -> None:
        map_device_memory(self.mapping, region.offset, worker.socket, extents)

    def unmap(self, region: Region) -> None:
        self._waits.synchronize()
        self.mapping.drop(region.offset, region.size)

    def clear(self, start: int, end: int) -> None:
        """Does nothing: what forwards read is written by forwards before."""

    def restore(self, start: int, end: int) -> None:
        self._resizer.restore(start, end)

    def withdraw(self, start: int, end: int) -> int:
        return self._resizer.withdraw(start, end)

    def vacate(self, start: int, end: int) -> None:
        raise AssertionError("the master has no requests")

    def forward(self) -> None:
        """Launches a kernel that reads and writes all borrowed memory."""
        places: list[Range] = [
            (self.mapping.address + loan.first * _BLOCK, (loan.region.end - loan.first) * _BLOCK)
            for loan in self.master.loans
            if loan.region is not None and loan.first < loan.region.end
        ]
        if places:
            self._streams.device.kernel(self._streams.borrower, places, places, fill=7)


class SimulatedLending:
    """Worker over the memory of a simulated engine, and its master.

    Args:
        held: returns the end of the blocks that requests of the engine hold.
        evict: frees blocks of cached KV.
    """

    def __init__(
        self, engine: SimulatedEngine, held: Callable[[], int], evict: Callable[[], None]
    ) -> None:
        self._held, self._evict, self._now = held, evict, 0.0
        self._resizer = engine.resizer
        name = Identity(secrets.token_bytes(8), identity().pid)
        slab, block = engine.slab, engine.layout.block_bytes
        self._memory = DeviceLendable(
            slab.mapping, (1 + self._resizer.least) * block, slab.size, engine.streams, slab.zero
        )
        self._server = DescriptorServer(name.socket, self._memory.descriptor)
        self.worker = Worker(
            self._memory, self, _TERMS, block=block, page=PAGE, first=1, memory_page=PIECE,
            identity=name, gpu="gpu",
        )  # fmt: skip
        self.borrower = SimulatedMaster(engine.streams, engine.library)

    # --- the worker's blocks --------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        return self._resizer.blocks

    def removable(self, blocks: int) -> int:
        return min(blocks, self._resizer.removable, 1 + self.blocks - self._held())

    def vacate(self, blocks: int) -> int:
        self._evict()
        return self.blocks - self._resizer.tail_free

    def shrink(self, blocks: int) -> bool:
        return self._resizer.shrink(blocks)

    def grow(self, blocks: int) -> None:
        self._resizer.grow(blocks)

    # --- both sides -----------------------------------------------------------------------------

    def step(self, need: int) -> None:
        """Runs a step of each side, whose messages arrive at once."""
        self._now += 1
        self.worker.step(need, self._now)
        master = self.borrower.master
        master.receive(self.worker.message, self._now)
        master.step(self._now)
        for keep in master.messages():
            self.worker.receive(keep, self._now)
        self.borrower.forward()

    def check_integrity(self) -> None:
        self.worker.check_integrity()
        self.borrower.master.check_integrity()

    def close(self) -> None:
        """Frees the master's addresses, and ends the server."""
        self._server.close()
        self.borrower._waits.synchronize()
        for each in (self.borrower, self):  # whose cycles would keep the memory
            vars(each).clear()
