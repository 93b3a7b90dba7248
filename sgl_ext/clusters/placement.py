"""Where entries lie: on which device, in which order, and what is kept in memory (Swarm §5.2).

Blocks are dealt out in turn, so that what is activated together is read from all devices at once,
and devices differ by one block at most. Clusters with replicas, as the paper places them, are
striped entry by entry with a pointer that goes on turning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.clustering import Clusters

SECTOR = 4096
"""Bytes that a device reads at once, and that reads without the page cache are multiples of."""


@dataclass(frozen=True)
class Blocks:
    """How the entries of all layers of a context lie on devices.

    Attributes:
        entries: of each layer; the last block may have room for more.
        entry_bytes: K and V of one.
        devices: as many files.
        layers: each with blocks of its own; they begin where those of the layer before end, on the
            next device.
    """

    entries: int
    entry_bytes: int
    devices: int
    layers: int

    @staticmethod
    def fitting(entry_bytes: int) -> int:
        """Entries of a block, of so many bytes."""
        return max(SECTOR // entry_bytes, 1)

    @property
    def block(self) -> int:
        """Entries of a block."""
        return self.fitting(self.entry_bytes)

    @property
    def block_bytes(self) -> int:
        """A multiple of a sector."""
        return -(-self.block * self.entry_bytes // SECTOR) * SECTOR

    @property
    def blocks(self) -> int:
        """Of a layer."""
        return -(-self.entries // self.block)

    def first(self, layer: int) -> int:
        """The device of the layer's first block (Eq. 7)."""
        return layer * self.blocks % self.devices

    def place(
        self, layer: int, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Device, and offset in its file, of blocks of a layer."""
        rows, device = np.divmod(layer * self.blocks + numbers, self.devices)
        return device, rows * self.block_bytes

    @property
    def file_bytes(self) -> int:
        """Of each device, at most."""
        return -(-self.layers * self.blocks // self.devices) * self.block_bytes


@dataclass(frozen=True)
class Replicas:
    """Where each member of each cluster lies, in the order of ``clusters.members``.

    Attributes:
        device: ``[members]``.
        row: ``[members]``; entries of a device are counted from 0.
    """

    device: NDArray[np.int64]
    row: NDArray[np.int64]


def stripe(clusters: Clusters, devices: int) -> Replicas:
    """Clusters one after the other, the entries of each on one device after the other (Eq. 7).

    A cluster that fills all devices alike would leave the pointer where it was, and the next one's
    medoid on the same device, so then it goes one further.
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
    """Seconds that keeping a cluster in memory saves, for each of its entries (Eq. 6).

    Args:
        frequency: ``[clusters]`` how often each is activated.
        sizes: ``[clusters]`` entries.
        latency: seconds to find it on a device.
        per_entry: seconds to read an entry.
    """
    saved: NDArray[np.float64] = frequency * (latency + sizes * per_entry) / sizes
    return saved
