"""Scheduler's memory on the simulated CUDA device: pool, tiers, allocator and forwards.

The content of each page of KV follows from its number, so that every forward can be checked by what
its kernels read. The stack is that of :func:`~sgl_ext.tiers.build.open_stack`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from simulated_device import Range, SimulatedDevice, checksum, pattern
from simulated_streams import SimulatedStreams, SimulatedTransfers
from stack_kit import planner_of
from tier_kit import Shelf

from sgl_ext.config import SwapExperiment, Tiers
from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.engine.kv.resize import HOLDERS, KVResizer
from sgl_ext.memory.cuda_mapping import CudaMemory
from sgl_ext.memory.device_slab import SharedDeviceSlab
from sgl_ext.memory.slab import Layout
from sgl_ext.memory.streams import Streams
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.prefixes import Prefixes
from sgl_ext.swap.manager import SwapManager
from sgl_ext.tiers import build
from sgl_ext.tiers.arena import Arena, Key, Pages, stride_of
from sgl_ext.tiers.tier import Tier

PAGE = 2
LAYERS = 3
SMALL = Layout(PAGE, LAYERS, kv_heads=1, head_dim=4, dtype="float16", fingerprint="t")
"""Layout whose blocks are 96 bytes"""
PIECE = 2 << 20
"""Bytes of a piece of device memory that can be lent"""
LARGE = Layout(PAGE, LAYERS, kv_heads=1, head_dim=20_000, dtype="float16", fingerprint="t")
"""Layout of which 16 blocks are in 4 pieces"""
_MOST = 64
"""Bytes of a layer of a token that kernels access; copies move all of them"""


def key(page: int) -> Key:
    """Returns the key of the page of KV with a number."""
    return page.to_bytes(8, "little") * 4


def page_of(key: Key) -> int:
    return int.from_bytes(key[:8], "little")


@dataclass(frozen=True)
class SimulatedSlab(SharedDeviceSlab):
    """Slab in the device's memory, which torch for CPUs can read."""

    gpu = "GPU-simulated"

    def _bytes(self) -> torch.Tensor:
        raw = (ctypes.c_uint8 * self.mapping.size).from_address(self.mapping.address)
        return torch.from_numpy(np.frombuffer(raw, np.uint8))


class SimulatedShelf(Shelf):
    """Lower tier that tells the race checker which host memory its threads access."""

    def __init__(self, arena: Arena, device: SimulatedDevice) -> None:
        super().__init__(arena)
        self._device = device

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        for page in pages.tolist():
            address = self.arena.address + page * self.arena.stride
            self._device.host_writes(address, self.arena.layout.block_bytes)
        return super().load(keys, pages)

    def store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        for page in pages.tolist():
            address = self.arena.address + page * self.arena.stride
            self._device.host_reads(address, self.arena.layout.block_bytes)
        return super().store(keys, pages)


class Span(NamedTuple):
    """Tokens ``start .. end - 1`` of a request that a forward computes."""

    pages: Sequence[int]
    """Numbers of the request's pages of KV"""
    blocks: Pages
    start: int
    end: int


@dataclass
class Read:
    """Kernel, and what it has to read."""

    kernel: int
    expected: int
    what: str


@dataclass
class SimulatedEngine:
    """Memory of one scheduler, and the forwards of its model.

    Args:
        blocks: blocks of the pool, with the padding block.
        host: pages of host memory.
        swap: pages of host memory that preempted requests may use.
        lower: whether there is a tier below host memory.
        emulated: whether another speed of copies is emulated.
    """

    streams: SimulatedStreams
    blocks: int
    host: int
    swap: int
    lower: bool = False
    emulated: bool = False
    layout: Layout = SMALL
    reads: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = self.streams.device
        self.library = self.device.fake._name
        self.slab = SimulatedSlab.create(
            self.layout, self.blocks, 0, piece_bytes=PIECE, library=self.library
        )
        self.device.fake.fake_name(self.slab.address, self.slab.size, b"pool")
        SimulatedTransfers.streams = self.streams
        capacity = self.host * stride_of(self.layout)
        link = {"bytes_per_second": 10**10, "latency": 1e-5} if self.emulated else None
        config = Tiers.model_validate({"host": {"capacity": capacity, "link": link}})

        def lower_tiers(
            _config: object, arena: Arena, _engine: object
        ) -> Iterator[tuple[Tier, int]]:
            if self.lower:
                yield SimulatedShelf(arena, self.device), 1

        with (
            patch.object(build, "TransferEngine", SimulatedTransfers),
            patch.object(build, "_lower_tiers", lower_tiers),
        ):
            costs = Costs()
            self.stack = build.open_stack(config, self.slab, self.streams, costs=costs)
            self.planner = planner_of(self.stack, costs, wait=config.wait, spare=self.swap)
            self.prefixes = Prefixes(self.stack, self.planner)
        self.arena = self.stack._copies._arena
        self.device.fake.fake_name(self.arena.address, self.arena.size, b"arena")
        self.manager = SwapManager(self.stack, self.swap, SwapExperiment())
        self.allocator = BlockGroupAllocator(
            (self.blocks - 1) * PAGE, PAGE, torch.float16, "cpu", None, False,
            expected_tokens=3 * PAGE,
        )  # fmt: skip
        self.allocator.in_flight = self.stack.in_flight
        self.allocator.streams = self.streams
        self.resizer = resizer(self.allocator, self.streams)
        self._width = min(self.layout.token_bytes // LAYERS, _MOST)

    # --- forwards -------------------------------------------------------------------------------

    def compute(self, spans: Sequence[Span], layer: int) -> None:
        """Launches the kernels of one layer, which read contexts and write new tokens."""
        self.stack.loads.layers.wait_until(layer)
        stream, width = self.streams.current(), self._width
        reads: list[Range] = []
        expected = []
        for span in spans:
            for page in range(-(-span.start // PAGE)):
                tokens = min(span.start - page * PAGE, PAGE)
                reads.append(self._rows(int(span.blocks[page]), layer, 0, tokens))
                expected.append(_content(span.pages[page], layer, width, tokens))
        what = f"layer {layer} of tokens {[(span.start, span.end) for span in spans]}"
        for span in spans:
            for page in range(span.start // PAGE, -(-span.end // PAGE)):
                first, last = max(span.start - page * PAGE, 0), min(span.end - page * PAGE, PAGE)
                rows = self._rows(int(span.blocks[page]), layer, first, last)
                fill = _fill(span.pages[page], layer)
                kernel = self.device.kernel(stream, reads, [rows], fill=fill)
                if reads:
                    self.reads.append(Read(kernel, checksum(*expected), what))
                    reads.clear()

    def _rows(self, block: int, layer: int, first: int, last: int) -> Range:
        layout = self.layout
        address = self.slab.address + block * layout.block_bytes
        address += first * layout.token_bytes + layer * (layout.token_bytes // LAYERS)
        return address, self._width, last - first, layout.token_bytes

    # --- checks, while no job accesses the memory -----------------------------------------------

    def wrong_reads(self, reads: Sequence[Read]) -> list[str]:
        """Returns a description of each kernel that has read something else than its context."""
        return [
            f"{read.what} read something else than its context"
            for read in reads
            if self.device.result(read.kernel) != read.expected
        ]

    def wrong_block(self, page: int, block: int) -> bool:
        """Returns whether a block does not hold the page of KV with a number."""
        return self._wrong(self.slab.address + block * self.layout.block_bytes, page)

    def wrong_pages(self) -> list[int]:
        """Returns the numbers of the pages in host memory whose content is another one."""
        index, stride = self.stack.host._index, self.arena.stride
        found = [(page_of(name), place) for name, place in index.items()]
        return [page for page, at in found if self._wrong(self.arena.address + at * stride, page)]

    def _wrong(self, address: int, page: int) -> bool:
        layout = self.layout
        raw = (ctypes.c_uint8 * layout.block_bytes).from_address(address)
        whole = np.frombuffer(raw, np.uint8).reshape(PAGE, LAYERS, -1)[:, :, : self._width]
        return any(
            whole[:, layer].tobytes() != _content(page, layer, self._width, PAGE).tobytes()
            for layer in range(LAYERS)
        )

    def check_integrity(self) -> None:
        self.stack.check_integrity()
        self.planner.check_integrity()
        self.manager.check_integrity()
        self.allocator.groups.check_integrity()

    def close(self) -> None:
        """Closes the stack, and frees host memory."""
        self.planner.close()
        self.stack.close()
        self.device.fake.fake_free(self.arena.address, self.arena.size)
        self.streams.close()

    # --- pieces ---------------------------------------------------------------------------------

    def piece(self, number: int) -> tuple[int, int]:
        """Returns the first block and the end of the blocks that lie in a piece, in part or not."""
        size = self.layout.block_bytes
        return number * PIECE // size, min(-(-(number + 1) * PIECE // size), self.blocks)

    def replace(self, number: int) -> bool:
        """Maps other memory in place of a piece, if its blocks are not in use."""
        start, end = self.piece(number)
        if self.resizer.withdraw(start, end):
            self.resizer.restore(start, end)
            return False
        self.slab.mapping.put(number * PIECE, CudaMemory.create(0, PIECE, library=self.library))
        self.resizer.restore(start, end)
        return True


def resizer(allocator: BlockGroupAllocator, streams: Streams) -> KVResizer:
    """Returns the resizer of an allocator's blocks, with what it needs of a scheduler."""
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, model_config=SimpleNamespace(context_len=1 << 20),
        **{name: SimpleNamespace(max_total_num_tokens=0) for name in HOLDERS},
    )  # fmt: skip
    return KVResizer(scheduler, streams)


def resources(device: SimulatedDevice) -> dict[str, int]:
    """Returns the number of objects of each kind that exist on the device."""
    fake = device.fake
    return {
        "streams": fake.fake_streams(), "events": fake.fake_events(),
        "mappings": fake.fake_mapped(), "registered bytes": fake.fake_registered_bytes(),
    }  # fmt: skip


def _fill(page: int, layer: int) -> int:
    return (page * 0x9E3779B97F4A7C15 + (layer + 1) * 0xD1B54A32D192ED03) % 2**64


@lru_cache(4096)
def _content(page: int, layer: int, width: int, tokens: int) -> np.ndarray:
    return np.tile(pattern(_fill(page, layer), width), tokens)
