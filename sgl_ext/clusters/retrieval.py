"""From which device each replica is read (Swarm §6.1): every entry once, all devices alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.clustering import Clusters
from sgl_ext.clusters.placement import Replicas


class Replicated:
    """Entries that lie in several places.

    Args:
        replicas: of the clusters.
        entries: how many there are.
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
        """What each device reads so that every wanted entry comes once.

        Args:
            wanted: entries, none twice.
            balance: the device with least to read gives an entry; otherwise the first that has it.

        Returns:
            Of each device the rows to read, sorted.
        """
        buckets: list[list[int]] = [[] for _ in range(self._devices)]
        begins = self._ends - self._copies
        # Those that only one device has go first, and the others make up for what they leave.
        order = wanted[np.argsort(self._copies[wanted], kind="stable")] if balance else wanted
        for entry in order:
            places = range(begins[entry], self._ends[entry])
            if balance:
                place = min(places, key=lambda at: len(buckets[self._device[at]]))
            else:
                place = places[0]
            buckets[self._device[place]].append(int(self._row[place]))
        return [np.sort(np.array(bucket, np.int64)) for bucket in buckets]
