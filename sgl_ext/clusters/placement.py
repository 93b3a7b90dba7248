"""Placement of a context's blocks on devices (Swarm §5.2).

Blocks are assigned to devices round-robin, so that entries that are activated together are read
from all devices in parallel, and devices differ by one block at most. Further copies of a block are
on the devices that come next: with two copies, any one device may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        devices: Number of devices, each with one file.
        layers: Number of layers. Each has its own blocks, which begin where those of the previous
            layer end, on the next device.
        copies: Copies of each block, at most as many as devices.
    """

    entries: int
    entry_bytes: int
    devices: int
    layers: int
    copies: int = 1

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

    def place(
        self, layer: int, numbers: NDArray[np.int64], copy: NDArray[np.int64] | int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the device and the file offset of each of the blocks ``numbers`` (Eq. 7).

        Args:
            copy: Copy of all blocks, or of each, from 0.
        """
        at = layer * self.blocks + numbers
        device: NDArray[np.int64] = (at + copy) % self.devices
        row: NDArray[np.int64] = at // self.devices + copy * self._rows
        return device, row * self.block_bytes

    @property
    def _rows(self) -> int:
        """Blocks of the device with most blocks, without further copies."""
        return -(-self.layers * self.blocks // self.devices)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file of each device, enough for the device with most blocks."""
        return self.copies * self._rows * self.block_bytes
