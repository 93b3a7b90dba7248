"""Clusters of entries that are activated together (Swarm §5.1, Algorithm 1).

As written, the algorithm makes one cluster of everything that is popular and single entries of
most of the rest. ``capped`` bounds a cluster's size and an entry's copies, chooses the radius by
how many neighbours entries have within it, and leaves entries that no query of the profile has
activated by themselves: they hold what unforeseen questions ask for.

Distances are Jaccard's, of the queries that activate either entry: the probability that both are
activated if one is.
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
        starts: ``[clusters + 1]`` int64, of each in ``members``, and the end.
        members: int32; of each cluster its medoid first, then from the nearest to it on. Every
            entry is in at least one cluster; those that were never active are alone in theirs, and
            last.
        radius: within which members lie.
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
        """``[clusters]``."""
        return self.members[self.starts[:-1]]

    def copies(self, entries: int) -> NDArray[np.int64]:
        """``[entries]`` clusters that each is in."""
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
    """Clusters of all entries of a layer.

    Args:
        mode: ``capped``; or as the paper has it (``faithful``), without comparing members with each
            other (``medoid-only``), or with every entry in one cluster (``no-replica``): those are
            bounded by the radius alone.
        most: members of a capped cluster.
        copies: clusters that an entry is in, if capped.
        neighbours: that half of the active entries have within the radius.
        radius: instead of the one that ``neighbours`` gives.
        threads: that share what is shared out: how many neighbours each entry has.
    """
    if radius is None:
        radius = activations.radius(neighbours)
    near = _clusters.density(activations.bits, radius, threads)
    frequency = activations.frequency
    # Among equals the one that is activated more often, then the first.
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
