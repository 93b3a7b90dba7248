"""Masters and workers without a model, over real memory, messages and blocks.

The memory is the host's, or that of a simulated CUDA device.

Their "requests" fill blocks with patterns, and later check that the patterns are still there.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from sgl_ext.memory.block_groups import BlockGroups
from sgl_ext.memory.descriptors import DescriptorServer
from sgl_ext.memory.device_lent import DeviceLendable, map_device_memory
from sgl_ext.memory.device_slab import SharedDeviceSlab
from sgl_ext.memory.lent import Extent, Lendable, map_memory
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.memory.streams import Streams
from sgl_ext.peer.master import Master
from sgl_ext.peer.process import Identity, identity
from sgl_ext.peer.regions import Region, Regions
from sgl_ext.peer.worker import Terms, Worker

MASTER = Layout(page=4, layers=3, kv_heads=1, head_dim=32, dtype="float32", fingerprint="master")
"""Layout of masters' memory, in blocks of 3 KiB."""
WORKER = Layout(page=4, layers=5, kv_heads=1, head_dim=32, dtype="float32", fingerprint="worker")
"""Layout of workers' memory, in blocks of 5 KiB."""
PIECE = 2 << 20
"""Bytes of a piece of device memory"""


class PlainSlab(SharedDeviceSlab):
    """Slab in a simulated device's memory, for processes that do without torch."""

    gpu = "GPU-simulated"

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raw = (ctypes.c_uint8 * self.mapping.size).from_address(self.mapping.address)
        return np.frombuffer(raw, np.uint8)

    def zero(self, offset: int, size: int) -> None:
        np.asarray(self)[offset : offset + size] = 0


def slab_of(
    layout: Layout, blocks: int, beyond: int = 0, library: str | None = None
) -> HostSlab | PlainSlab:
    """Returns a slab in host memory, or in pieces of the device of a library.

    The blocks on a device are 64 times as large.
    """
    if library is None:
        return HostSlab.create(layout, blocks, beyond=beyond)
    layout = replace(layout, head_dim=64 * layout.head_dim)
    return PlainSlab.create(layout, blocks, 0, beyond=beyond, piece_bytes=PIECE, library=library)


class Light:
    """Engine with random requests, each of which holds a random number of blocks for a while."""

    def __init__(self, slab: HostSlab | PlainSlab, groups: BlockGroups, seed: int) -> None:
        self.slab, self.groups = slab, groups
        memory = slab.mapping if isinstance(slab, HostSlab) else slab
        self.bytes = np.asarray(memory).view(np.uint64)
        self.words = slab.layout.block_bytes // 8
        self.choose = random.Random(seed)  # noqa: S311
        self.requests: dict[int, tuple[int, list[int]]] = {}
        """Pattern and blocks of each request, by owner."""
        self.served = 0

    def block(self, number: int) -> np.ndarray:
        return self.bytes[number * self.words : (number + 1) * self.words]

    def begin(self, blocks: int) -> bool:
        owner = self.choose.randrange(1 << 40)
        runs = self.groups.allocate([(owner, blocks)])
        if runs is None:
            return False
        held = [b for start, length in runs[0] for b in range(start, start + length)]
        pattern = self.choose.randrange(1, 1 << 60)
        for number in held:
            self.block(number)[:] = pattern + number
        self.requests[owner] = pattern, held
        return True

    def end(self, owner: int) -> None:
        self.check(owner)
        _, held = self.requests.pop(owner)
        self.groups.release([(number, 1) for number in held])
        self.groups.close(owner)
        self.served += 1

    def check(self, owner: int) -> None:
        pattern, held = self.requests[owner]
        for number in held:
            found = self.block(number)
            assert (found == pattern + number).all(), (owner, number, found[0], pattern + number)

    def serve(self, most: int) -> None:
        """Ends some requests, begins at most one, and checks one."""
        while self.requests and self.choose.random() < 0.5:
            self.end(self.choose.choice(list(self.requests)))
        if self.choose.random() < 0.7:
            self.begin(self.choose.randrange(1, most))
        if self.requests:
            self.check(self.choose.choice(list(self.requests)))

    @property
    def held(self) -> int:
        return sum(len(held) for _, held in self.requests.values())


class LightWorker(Light):
    """Engine of a worker.

    The worker knows the need of waiting requests before they begin, but not that of the requests
    that :meth:`serve` begins.
    """

    def __init__(
        self,
        blocks: int,
        terms: Terms,
        seed: int = 0,
        process: object = None,
        library: str | None = None,
    ) -> None:
        slab = slab_of(WORKER, 1 + blocks, library=library)
        super().__init__(slab, BlockGroups(blocks, page=WORKER.page, expected_tokens=1), seed)
        block, name = slab.layout.block_bytes, identity()
        self.memory: Lendable | DeviceLendable
        if isinstance(slab, HostSlab):
            self.memory = Lendable(slab.mapping, slab.fd, slab.name, 2 * block, slab.size)
        else:
            self.memory = DeviceLendable(slab.mapping, 2 * block, slab.size, Streams(), slab.zero)
            self.server = DescriptorServer(name.socket, self.memory.descriptor)
        options = {} if process is None else {"process": process}
        self.worker = Worker(
            self.memory, self, terms, block=block, page=WORKER.page, first=1,
            memory_page=slab.memory_page, identity=name, gpu=slab.gpu, **options,
        )  # fmt: skip
        self.wanted = 0
        """Number of blocks that the next request waits for; 0 if none waits."""

    @property
    def blocks(self) -> int:
        return self.groups.blocks

    def removable(self, blocks: int) -> int:
        return min(blocks, self.groups.tail_free)

    def vacate(self, blocks: int) -> int:
        return self.groups.blocks - self.groups.tail_free

    def shrink(self, blocks: int) -> bool:
        return self.groups.shrink(blocks)

    def grow(self, blocks: int) -> None:
        self.groups.grow(blocks)

    def check_integrity(self) -> None:
        self.groups.check_integrity()
        self.worker.check_integrity()

    def step(self, now: float) -> None:
        self.worker.step((self.held + self.wanted) * WORKER.page, now)
        if self.wanted and self.begin(self.wanted):
            self.wanted = 0


class LightMaster(Light):
    """Engine of a master, which prefers its own blocks.

    Requests end when blocks that they hold are vacated.
    """

    def __init__(
        self,
        blocks: int,
        beyond: int,
        lease: float,
        seed: int = 0,
        process: object = None,
        library: str | None = None,
    ) -> None:
        slab = slab_of(MASTER, 1 + blocks, beyond, library)
        groups = BlockGroups(blocks + beyond, page=MASTER.page, expected_tokens=1, near=blocks)
        groups.withdraw(1 + blocks, 1 + blocks + beyond)
        super().__init__(slab, groups, seed)
        block = slab.layout.block_bytes
        regions = Regions(1 + blocks, slab.blocks, block, slab.memory_page)
        options = {} if process is None else {"process": process}
        self.master = Master(
            self, self, regions, block=block, capacity=beyond * block, lease=lease,
            identity=identity(), **options,
        )  # fmt: skip
        self.slow = False
        """True if requests stay in the blocks that are to be vacated."""

    def check_integrity(self) -> None:
        self.groups.check_integrity()
        self.master.check_integrity()

    def refusal(self, gpu: str) -> str:
        return "" if gpu == self.slab.gpu else "memory of another kind"

    def map(self, region: Region, worker: Identity, extents: Sequence[Extent]) -> None:
        if isinstance(self.slab, HostSlab):
            map_memory(self.slab.mapping, region.offset, worker.pid, extents)
        else:
            map_device_memory(self.slab.mapping, region.offset, worker.socket, extents)

    def unmap(self, region: Region) -> None:
        self.slab.mapping.drop(region.offset, region.size)

    def clear(self, start: int, end: int) -> None:
        block = self.slab.layout.block_bytes // self.bytes.itemsize
        self.bytes[start * block : end * block] = 0

    def restore(self, start: int, end: int) -> None:
        self.groups.restore(start, end)

    def withdraw(self, start: int, end: int) -> int:
        return self.groups.withdraw(start, end)

    def vacate(self, start: int, end: int) -> None:
        if self.slow:
            return
        for owner, (_, held) in list(self.requests.items()):
            if any(start <= number < end for number in held):
                self.end(owner)
