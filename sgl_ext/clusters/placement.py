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
    """

    entries: int
    entry_bytes: int
    devices: int
    layers: int
    copies: int = 1
    later: tuple[int, ...] = ()

    @staticmethod
    def fitting(entry_bytes: int) -> int:
        """Returns the entries of a block, for entries of ``entry_bytes``."""
        return max(SECTOR // entry_bytes, 1)

    @property
    def block(self) -> int:
        """Entries of a block."""
        return self.fitting(self.entry_bytes)

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
        device = (layer * self._bounds[1] + numbers + copy) % self.devices
        row = (numbers - self._bounds[extent]) // self.devices
        row += (layer + copy * self.layers) * self._rows[extent]
        file: NDArray[np.int64] = extent * self.devices + device
        return file, row * self.block_bytes

    @property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of each file of an extent, enough for the device with most blocks."""
        each = self.copies * self.layers * self.block_bytes
        return tuple(each * int(rows) for rows in self._rows)

    @cached_property
    def _bounds(self) -> NDArray[np.int64]:
        """First block of each extent, and the end of the last one."""
        return np.array([0, *(each // self.block for each in self.later), self.blocks], np.int64)

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """Blocks of a layer on the device with most of them, in each extent, without copies."""
        return -(-np.diff(self._bounds) // self.devices)
