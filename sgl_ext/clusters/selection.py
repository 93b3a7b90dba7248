"""Selection of the entries of a context that a query attends to (Swarm §5.2, §6.1).

Scores are attention mass, estimated from data in memory. By default blocks are selected: the
entries of a block are activated together, so its score is the sum of theirs, and the best blocks of
each device are read, equally many from all. The paper instead scores clusters by their medoids.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.clustering import Clusters


def best_entries(scores: NDArray[np.float32], budget: int) -> NDArray[np.int64]:
    """Returns the ``budget`` entries with the highest scores, sorted by number."""
    if budget >= len(scores):
        return np.arange(len(scores))
    found: NDArray[np.int64] = np.argpartition(scores, len(scores) - budget)[-budget:]
    return np.sort(found)


def best_blocks(
    scores: NDArray[np.float32], share: float, *, block: int, devices: int
) -> NDArray[np.int64]:
    """Returns the blocks with the highest scores, equally many from each device that has as many.

    Args:
        scores: Scores of the entries in the order of storage, float32 ``[rows, entries]``.
        share: Share of the blocks to select; 1 selects all.
        block: Entries of a block; the last may have fewer.
        devices: Number of devices, which blocks are assigned to round-robin.

    Returns:
        Numbers of the blocks, int64 ``[rows, blocks]``, each row sorted.
    """
    blocks = -(-scores.shape[1] // block)
    deal = _clusters.Deal(block, devices, each_of(share, blocks, devices))
    return _clusters.best_blocks(scores, deal)


def each_of(share: float, blocks: int, devices: int) -> int:
    """Returns the largest number of blocks that are selected from a device."""
    return -(-blocks_of(share, blocks, devices) // devices)


def blocks_of(share: float, blocks: int, devices: int) -> int:
    """Returns the largest number of blocks that :func:`best_blocks` selects."""
    each = max(math.ceil(share * blocks / devices), 1)
    return min(each * devices, blocks)


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
