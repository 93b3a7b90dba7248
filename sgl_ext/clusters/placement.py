"""Placement of a context's blocks on devices (Swarm §5.2).

Blocks are assigned to devices round-robin, so that entries that are activated together are read
from all devices in parallel, and devices differ by one block at most. Further copies of a block are
on the devices that come next: with two copies, any one device may be lost.

The blocks that are stored at once are an *extent*, which has one file on each device. A context
that continues another one shares its extents and has one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

SECTOR = 4096
"""Unit of a device's reads, in bytes; reads that bypass the page cache are multiples of it."""


@dataclass(frozen=True)
class Blocks:
    """Placement of the entries of all layers of a context on devices.

    Attributes:
        entries: Entries of each layer; the last block may have room for more.
        entry_bytes: Bytes of the K and V of an entry.
        devices: Number of devices.
        layers: Number of layers. Each has its own blocks, which begin on the device behind the last
            one of the previous layer (in the first extent).
        copies: Copies of each block, at most as many as devices.
        later: Entries before each extent but the first, a multiple of :attr:`block` each.
        size: Entries of a block; 0 for as many as :data:`SECTOR` bytes hold, one at least.
    """

    entries: int
    entry_bytes: int
    devices: int
    layers: int
    copies: int = 1
    later: tuple[int, ...] = ()
    size: int = 0

    @staticmethod
    def fitting(entry_bytes: int) -> int:
        """Returns the entries of a block, unless another number is chosen."""
        return max(SECTOR // entry_bytes, 1)

    @property
    def block(self) -> int:
        """Entries of a block."""
        return self.size or self.fitting(self.entry_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, a multiple of :data:`SECTOR`."""
        return -(-self.block * self.entry_bytes // SECTOR) * SECTOR

    @property
    def blocks(self) -> int:
        """Number of blocks of a layer."""
        return -(-self.entries // self.block)

    @property
    def extents(self) -> int:
        """Number of extents."""
        return 1 + len(self.later)

    def place(
        self, layer: int, numbers: NDArray[np.int64], copy: NDArray[np.int64] | int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the file and the offset in it of each of the blocks ``numbers`` (Eq. 7).

        Files are numbered by extent, and those of an extent by device.

        Args:
            copy: Copy of all blocks, or of each, from 0.
        """
        extent = np.searchsorted(self._bounds[1:-1], numbers, side="right")
        first = (layer * self._bounds[1] + numbers) % self.devices
        device = (first + copy) % self.devices
        row = self._before[extent, copy, layer, device]
        row += (numbers - self._bounds[extent]) // self.devices
        file: NDArray[np.int64] = extent * self.devices + device
        return file, row * self.block_bytes

    @cached_property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of each file; room for a block at least."""
        rows = np.maximum(self._before[:, -1, -1] + self._counts[:, -1, -1], 1)
        return tuple((rows.reshape(-1) * self.block_bytes).tolist())

    @cached_property
    def _bounds(self) -> NDArray[np.int64]:
        """First block of each extent, and the end of the last one."""
        return np.array([0, *(each // self.block for each in self.later), self.blocks], np.int64)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Blocks of each device, int64 ``[extents, copies, layers, devices]``."""
        extent, copy, layer, device = np.ogrid[
            : self.extents, : self.copies, : self.layers, : self.devices
        ]
        begin, end = self._bounds[extent], self._bounds[extent + 1]
        ahead = (device - copy - layer * self._bounds[1] - begin) % self.devices
        found: NDArray[np.int64] = (end - begin - ahead + self.devices - 1) // self.devices
        return found

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """Blocks of each device before those of a layer and copy, in the shape of ``_counts``."""
        flat = self._counts.reshape(self.extents, self.copies * self.layers, self.devices)
        return (np.cumsum(flat, axis=1) - flat).reshape(self._counts.shape)
