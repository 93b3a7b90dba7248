"""Which entries of a context a query is given (Swarm §5.2, §6.1), from what is in memory of them.

Scores are estimated attention mass. The default reads blocks: what lies in one piece of a device is
activated together, so a block's score is that of all its entries, and every device gives as many
blocks as the others, the best that it has. The paper's way is to score clusters by their medoids.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.clustering import Clusters


def best_entries(scores: NDArray[np.float32], budget: int) -> NDArray[np.int64]:
    """The ``budget`` entries of highest score, sorted by number."""
    if budget >= len(scores):
        return np.arange(len(scores))
    found: NDArray[np.int64] = np.argpartition(scores, len(scores) - budget)[-budget:]
    return np.sort(found)


def best_blocks(
    scores: NDArray[np.float32], share: float, *, block: int, devices: int
) -> NDArray[np.int64]:
    """The blocks of highest score, as many of each device.

    Args:
        scores: ``[rows, entries]``, in the order in which they are stored.
        share: of the blocks; with 1 all of them.
        block: entries of one; the last may have fewer.
        devices: that blocks are dealt out to in turn.

    Returns:
        ``[rows, blocks]`` numbers, of each row sorted.
    """
    blocks = -(-scores.shape[1] // block)
    return _clusters.best_blocks(scores, block, devices, each_of(share, blocks, devices))


def each_of(share: float, blocks: int, devices: int) -> int:
    """How many blocks every device gives, at most."""
    return -(-blocks_of(share, blocks, devices) // devices)


def blocks_of(share: float, blocks: int, devices: int) -> int:
    """How many blocks :func:`best_blocks` finds, at most."""
    each = max(math.ceil(share * blocks / devices), 1)
    return min(each * devices, blocks)


def best_clusters(
    scores: NDArray[np.float32], clusters: Clusters, budget: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The clusters of highest score until they have ``budget`` entries together, at least.

    Args:
        scores: ``[clusters]``, of their medoids.
        budget: entries, each counted once (Eq. 8); all if there are fewer.

    Returns:
        The clusters, best first, and their entries, sorted.
    """
    order = np.argsort(-scores, kind="stable")
    sizes = clusters.sizes[order]
    ends = np.cumsum(sizes)
    at = np.arange(ends[-1])
    members = clusters.members[np.repeat(clusters.starts[order] - (ends - sizes), sizes) + at]
    # How many different ones there are up to each member: of two writes to a place the later stays.
    first = np.full(members.max() + 1, -1)
    first[members[::-1]] = at[::-1]
    reached = np.cumsum(first[members] == at)[ends - 1]
    count = int(np.searchsorted(reached, min(budget, reached[-1]))) + 1
    return order[:count], np.unique(members[: ends[count - 1]])
