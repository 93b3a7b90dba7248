"""Clusters of entries that are activated together (Swarm §5.1, Algorithm 1).

As published, the algorithm puts all popular entries into one cluster and most of the others into
clusters of a single entry. The radius is the one within which entries have a given number of
neighbours. Entries that no query of the profile has activated are in clusters of their own:
unforeseen questions may need them.

Distances are Jaccard distances of the sets of queries that activate the entries: one minus the
probability that both entries are activated if one is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.activations import Activations

_SAMPLE = 256
"""Largest number of entries from which a radius is estimated."""


@dataclass(frozen=True)
class Clusters:
    """Clusters of one layer's entries.

    Attributes:
        starts: Position in ``members`` of the first member of each cluster, and the end, int64
            ``[clusters + 1]``.
        members: Entries of each cluster, int32: its medoid, then the others, the nearest to the
            medoid first. Every entry is in at least one cluster. Entries that were never active
            are alone in clusters, which come last.
        radius: Upper bound, exclusive, of the distance between a member and its medoid.
    """

    starts: NDArray[np.int64]
    members: NDArray[np.int32]
    radius: float

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @property
    def medoids(self) -> NDArray[np.int32]:
        """Medoid of each cluster, int32 ``[clusters]``."""
        return self.members[self.starts[:-1]]


def cluster(
    activations: Activations, *, neighbours: int = 8, radius: float | None = None, threads: int = 1
) -> Clusters:
    """Returns clusters of all entries of a layer.

    Args:
        neighbours: Number of neighbours that half of the active entries have within the radius.
        radius: Radius to use instead of the one that ``neighbours`` gives.
        threads: Threads that count the neighbours of the entries; the rest is not parallel.
    """
    if radius is None:
        radius = radius_of(activations, neighbours)
    near = _clusters.density(activations.bits, radius, threads)
    frequency = activations.frequency
    # Most neighbours first; among equals the most frequently activated one, then the first.
    order = np.lexsort((-frequency, -near)).astype(np.int32)
    seen = frequency > 0
    starts, members = _clusters.cluster(activations.bits, order[seen[order]], radius)
    alone = np.flatnonzero(~seen).astype(np.int32)
    starts = np.concatenate([starts, starts[-1] + 1 + np.arange(len(alone))])
    return Clusters(starts, np.concatenate([members, alone]), radius)


def radius_of(activations: Activations, neighbours: int) -> float:
    """Returns the distance within which half of the active entries have ``neighbours`` others.

    The distance is estimated from a sample of the active entries. It is at most 1.
    """
    active = np.flatnonzero(activations.frequency)
    if len(active) <= neighbours:
        return 1.0
    sample = np.random.default_rng(0).permutation(active)[:_SAMPLE]
    # The nearest entry is the entry itself.
    nth = [
        np.partition(_clusters.distances(activations.bits, int(entry)), neighbours)[neighbours]
        for entry in sample
    ]
    # Slightly larger than the median, because members are nearer than the radius. At most 1,
    # the distance of entries that share no query.
    return min(float(np.nextafter(np.float32(np.median(nth)), np.float32(2.0))), 1.0)


def best_clusters(
    scores: NDArray[np.float32], clusters: Clusters, budget: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the clusters with the highest scores that together have at least ``budget`` entries.

    Args:
        scores: Scores of the medoids, ``[clusters]``.
        budget: Number of distinct entries (Eq. 8); all entries if there are fewer.

    Returns:
        The clusters, best first, and their distinct entries, sorted.
    """
    order = np.argsort(-scores, kind="stable")
    sizes = clusters.sizes[order]
    ends = np.cumsum(sizes)
    at = np.arange(ends[-1])
    members = clusters.members[np.repeat(clusters.starts[order] - (ends - sizes), sizes) + at]
    # Number of distinct entries up to each member. The last of several writes to an index remains.
    first = np.full(members.max() + 1, -1)
    first[members[::-1]] = at[::-1]
    reached = np.cumsum(first[members] == at)[ends - 1]
    count = int(np.searchsorted(reached, min(budget, reached[-1]))) + 1
    return order[:count], np.unique(members[: ends[count - 1]])
