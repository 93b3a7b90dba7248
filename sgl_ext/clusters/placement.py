"""Placement of entries: their device, their order, and the value of memory for them (Swarm §5.2).

Blocks are assigned to devices round-robin, so that entries that are activated together are read
from all devices in parallel, and devices differ by one block at most. Clusters with replicas are
placed as in the paper: striped entry by entry, with a pointer that continues from one cluster to
the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.clustering import Clusters

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
    """

    entries: int
    entry_bytes: int
    devices: int
    layers: int

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

    def first(self, layer: int) -> int:
        """Returns the device of the first block of a layer (Eq. 7)."""
        return layer * self.blocks % self.devices

    def place(
        self, layer: int, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the device, and the offset in its file, of each of the blocks ``numbers``."""
        rows, device = np.divmod(layer * self.blocks + numbers, self.devices)
        return device, rows * self.block_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file of each device, enough for the device with most blocks."""
        return -(-self.layers * self.blocks // self.devices) * self.block_bytes


@dataclass(frozen=True)
class Replicas:
    """Placement of each member of each cluster, in the order of ``clusters.members``.

    Attributes:
        device: Device of each member, ``[members]``.
        row: Number of each member among the entries of its device, from 0, ``[members]``.
    """

    device: NDArray[np.int64]
    row: NDArray[np.int64]


def stripe(clusters: Clusters, devices: int) -> Replicas:
    """Places clusters one after the other, each striped entry by entry over the devices (Eq. 7).

    A cluster that fills all devices equally would leave the pointer unchanged, and the next medoid
    would be on the same device. The pointer then advances by one more.
    """
    sizes = clusters.sizes
    steps = sizes + (sizes % devices == 0)
    start = np.concatenate([[0], np.cumsum(steps)[:-1]])
    within = np.arange(len(clusters.members)) - np.repeat(clusters.starts[:-1], sizes)
    device = (np.repeat(start, sizes) + within) % devices
    row = np.empty(len(device), np.int64)
    for one in range(devices):
        mine = device == one
        row[mine] = np.arange(mine.sum())
    return Replicas(device, row)


def cost_effectiveness(
    frequency: NDArray[np.float64],
    sizes: NDArray[np.int64],
    *,
    latency: float,
    per_entry: float,
) -> NDArray[np.float64]:
    """Returns the seconds per entry that keeping each cluster in memory saves (Eq. 6).

    Args:
        frequency: Frequency with which each cluster is activated, ``[clusters]``.
        sizes: Entries of each cluster, ``[clusters]``.
        latency: Seconds until a device begins to read a cluster.
        per_entry: Seconds to read an entry.
    """
    saved: NDArray[np.float64] = frequency * (latency + sizes * per_entry) / sizes
    return saved
