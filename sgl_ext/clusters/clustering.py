"""Clusters of entries that are activated together (Swarm §5.1, Algorithm 1).

As published, the algorithm puts all popular entries into one cluster and most of the others into
clusters of a single entry. The mode ``capped`` bounds the size of a cluster and the copies of an
entry. In all modes, the radius is by default the one within which entries have a given number of
neighbours, and entries that no query of the profile has activated are in clusters of their own:
unforeseen questions may need them.

Distances are Jaccard distances of the sets of queries that activate the entries: one minus the
probability that both entries are activated if one is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.activations import Activations

Mode = Literal["capped", "faithful", "medoid-only", "no-replica"]

_UNBOUNDED = 1 << 31


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

    def copies(self, entries: int) -> NDArray[np.int64]:
        """Returns the number of clusters that each entry is in, ``[entries]``."""
        return np.bincount(self.members, minlength=entries)


def cluster(
    activations: Activations,
    mode: Mode = "capped",
    *,
    most: int = 16,
    copies: int = 4,
    neighbours: int = 8,
    radius: float | None = None,
    threads: int = 1,
) -> Clusters:
    """Returns clusters of all entries of a layer.

    Args:
        mode: ``capped`` bounds clusters by ``most`` and ``copies``; the radius alone bounds the
            clusters of the other modes. ``faithful`` is the algorithm of the paper,
            ``medoid-only`` does not compare members with each other, and ``no-replica`` puts every
            entry into one cluster only.
        most: Largest number of members of a cluster, for ``capped``.
        copies: Largest number of clusters that an entry is in, for ``capped``.
        neighbours: Number of neighbours that half of the active entries have within the radius.
        radius: Radius to use instead of the one that ``neighbours`` gives.
        threads: Threads that count the neighbours of the entries; the rest is not parallel.
    """
    if radius is None:
        radius = activations.radius(neighbours)
    near = _clusters.density(activations.bits, radius, threads)
    frequency = activations.frequency
    # Most neighbours first; among equals the most frequently activated one, then the first.
    order = np.lexsort((-frequency, -near)).astype(np.int32)
    seen = frequency > 0
    bound = (most, copies) if mode == "capped" else (_UNBOUNDED, _UNBOUNDED)
    starts, members = _clusters.cluster(
        activations.bits, order[seen[order]], radius, bound[0],
        1 if mode == "no-replica" else bound[1], mode != "medoid-only",
    )  # fmt: skip
    alone = np.flatnonzero(~seen).astype(np.int32)
    starts = np.concatenate([starts, starts[-1] + 1 + np.arange(len(alone))])
    return Clusters(starts, np.concatenate([members, alone]), radius)
