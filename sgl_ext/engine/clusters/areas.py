"""Memory that devices write blocks of a context into."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.reader import Reading
from sgl_ext.memory.transfer import TransferEngine


class Prefetched(NamedTuple):
    """Blocks that are read before they are wanted.

    Attributes:
        layer: layer of the blocks.
        numbers: numbers of the blocks, in their order in memory.
        order: indices that sort ``numbers``.
    """

    layer: int
    numbers: NDArray[np.int64]
    order: NDArray[np.int64]


class Area:
    """Memory that devices write blocks into.

    Args:
        bytes_: the memory, uint8 ``[most, block_bytes]``, at a multiple of the devices' sectors.
        owner: object that keeps the memory alive.
        first: slot of the first block, if the attention reads blocks where devices have written
            them; None if they have to be copied.
    """

    def __init__(
        self,
        engine: TransferEngine,
        bytes_: NDArray[np.uint8],
        owner: object,
        first: int | None = None,
    ) -> None:
        self.bytes, self.first = bytes_, first
        self.region = engine.register(bytes_.ctypes.data, bytes_.nbytes, owner=owner)
        self.reading: Reading | None = None
        """Latest read into the memory, which is in use until the read is finished."""
        self.prefetched: Prefetched | None = None
        """Blocks of the latest read, if they were prefetched and are not yet wanted."""

    @classmethod
    def apart(cls, engine: TransferEngine, blocks: Blocks, most: int) -> Area:
        """Returns memory of its own for ``most`` blocks."""
        memory = mmap.mmap(-1, most * blocks.block_bytes)
        bytes_ = np.frombuffer(memory, np.uint8).reshape(most, blocks.block_bytes)
        return cls(engine, bytes_, memory)

    @property
    def busy(self) -> bool:
        """True if a device may still write into the memory."""
        return self.reading is not None and not self.reading.finished
