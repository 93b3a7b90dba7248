"""Clusters of KV entries that are activated together."""

import numpy as np
from numpy.typing import NDArray

def density(bits: NDArray[np.uint64], radius: float, threads: int) -> NDArray[np.int32]:
    """How many others are nearer than the radius to each entry (Swarm Eq. 4); without the GIL.

    The distance of two entries is one minus the queries that activate both over those that
    activate either; an entry that none activates is near to no other.

    Args:
        bits: ``[entries, words]``, one bit for each query.

    Returns:
        ``[entries]``.
    """

def distances(bits: NDArray[np.uint64], entry: int) -> NDArray[np.float32]:
    """``[entries]``: how far each is from one of them; without the GIL."""

def cluster(
    bits: NDArray[np.uint64],
    order: NDArray[np.int32],
    radius: float,
    most: int,
    copies: int,
    pairwise: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Clusters around entries that are in none when their turn comes (Swarm Algorithm 1).

    Without the GIL, in one thread: a scan of all entries for each cluster.

    Args:
        order: entries that may become medoids, in turn.
        most: members of a cluster, its medoid included.
        copies: clusters that an entry is in.
        pairwise: members are nearer than the radius on average to those before them, and not only
            to the medoid.

    Returns:
        Where each cluster starts among the members, and the end; the members, of each cluster its
        medoid first, then from the nearest to it on.

    Raises:
        ValueError: an entry that there is not, or no room for a member.
    """
