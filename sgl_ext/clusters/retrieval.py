"""Choice of the replicas to read (Swarm §6.1): every entry once, and devices balanced."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.clustering import Clusters
from sgl_ext.clusters.placement import Replicas


class Replicated:
    """Entries that are stored in several places.

    Args:
        clusters: Clusters of the entries.
        replicas: Placement of the members of the clusters.
        entries: Number of entries.
        devices: Number of devices.
    """

    def __init__(self, clusters: Clusters, replicas: Replicas, entries: int, devices: int) -> None:
        self._devices = devices
        order = np.argsort(clusters.members, kind="stable")
        copies = clusters.copies(entries)
        self._ends = np.cumsum(copies)
        self._copies = copies
        self._device = replicas.device[order]
        self._row = replicas.row[order]

    def schedule(
        self, wanted: NDArray[np.int64], *, balance: bool = True
    ) -> list[NDArray[np.int64]]:
        """Returns the rows that each device reads, so that every wanted entry is read once.

        Args:
            wanted: Entries, without duplicates.
            balance: Whether to read an entry from the device with the fewest reads; otherwise the
                first replica is read.

        Returns:
            Rows to read of each device, sorted.
        """
        buckets: list[list[int]] = [[] for _ in range(self._devices)]
        begins = self._ends - self._copies
        # Entries with the fewest replicas come first; the others then balance the devices.
        order = wanted[np.argsort(self._copies[wanted], kind="stable")] if balance else wanted
        for entry in order:
            places = range(begins[entry], self._ends[entry])
            if balance:
                place = min(places, key=lambda at: len(buckets[self._device[at]]))
            else:
                place = places[0]
            buckets[self._device[place]].append(int(self._row[place]))
        return [np.sort(np.array(bucket, np.int64)) for bucket in buckets]
