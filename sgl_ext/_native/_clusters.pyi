"""Clusters and blocks of KV entries that are activated together, and codes of keys (Swarm)."""

import numpy as np
from numpy.typing import NDArray

def density(bits: NDArray[np.uint64], radius: float, threads: int) -> NDArray[np.int32]:
    """Counts, for each entry, the other entries within the radius (Swarm Eq. 4).

    The distance between two entries is one minus the ratio of the number of queries that activate
    both to the number of queries that activate at least one of them. An entry that no query
    activates has no neighbours. Runs without the GIL.

    Args:
        bits: queries that activate each entry, one bit per query, ``[entries, words]``.
        radius: upper bound, exclusive, of the distance.

    Returns:
        Counts, ``[entries]``.
    """

def distances(bits: NDArray[np.uint64], entry: int) -> NDArray[np.float32]:
    """Returns the distance of each entry from ``entry``, as in :func:`density`, ``[entries]``.

    Runs without the GIL.

    Raises:
        ValueError: the entry does not exist.
    """

def cluster(
    bits: NDArray[np.uint64], order: NDArray[np.int32], radius: float
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Forms clusters, each around an entry that is not in a cluster yet (Swarm Algorithm 1).

    Runs without the GIL in one thread, which scans all entries for each cluster.

    Args:
        bits: queries that activate each entry, one bit per query, ``[entries, words]``.
        order: candidates for medoids, in the order in which they are considered.
        radius: upper bound, exclusive, of the distance of a member from its medoid, and of its
            mean distance from the members before it.

    Returns:
        Position in the members at which each cluster starts, and the end, ``[clusters + 1]``; and
        the members of each cluster: its medoid, then the others by increasing distance from it.

    Raises:
        ValueError: an entry of ``order`` does not exist.
    """

def blocks(bits: NDArray[np.uint64], block: int, window: int) -> NDArray[np.int32]:
    """Orders the entries so that the entries of a block are activated together.

    A block begins with the entry nearest to the last entry of the previous block and continues
    with the entries whose mean distance from its members is smallest. If no candidate shares a
    query with them, the most frequently activated one is next. Runs without the GIL.

    Args:
        bits: queries that activate each entry, one bit per query, ``[entries, words]``.
        block: entries per block.
        window: number of candidates for a block: the most frequently activated of the remaining
            entries. The run time is that of ``entries * window`` distances.

    Returns:
        Each entry once, ``[entries]``.

    Raises:
        ValueError: ``block`` is 0, or ``window`` is smaller than ``block``.
    """

def checksums(rows: NDArray[np.uint8], only: NDArray[np.int64] | None = None) -> NDArray[np.uint64]:
    """Computes a checksum of each row of ``[rows, bytes]``, or of some rows; without the GIL.

    Raises:
        ValueError: a number in ``only`` is that of no row.
    """

def nearest(points: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    """Finds the nearest centroid of each point in each subspace; without the GIL.

    Args:
        points: ``[subspaces, points, width]``.
        centroids: ``[subspaces, centroids, width]``, at least one.

    Returns:
        Numbers of the centroids, ``[subspaces, points]``; of equally near ones the first.

    Raises:
        ValueError: the shapes do not match.
    """

class Codes:
    """Codes of the keys of one layer, which it keeps alive.

    Args:
        codes: ``[kv_heads, entries, subspaces]``.
        centroids: ``[kv_heads, head_dim, 256]``, bits of bfloat16: the value of each dimension in
            the centroids of its subspace. The dimensions of a subspace are consecutive.
        projection: ``[kv_heads, head_dim, head_dim]``, which queries are multiplied by.
        mean: mean of the keys, ``[kv_heads, head_dim]``.
    """

    def __init__(
        self,
        codes: NDArray[np.uint8],
        centroids: NDArray[np.uint16],
        projection: NDArray[np.float32],
        mean: NDArray[np.float32],
    ) -> None: ...

class Visible:
    """Keys that rows see beside those with codes.

    They are ``[slots, kv_heads, head_dim]``, bfloat16 or float32, given by address and stride in
    elements. The caller keeps them alive and has checked that the slots exist.

    Args:
        near: keys of which all rows see the first ``count``.
        own: keys of which row ``i`` sees those at ``lengths[i]`` of ``slots`` from ``starts[i]``.
        sums: log-sum-exp of the logits of further keys, ``[rows, heads]``; None if there are none.
    """

    def __init__(
        self,
        near: int,
        near_stride: int,
        count: int,
        own: int,
        own_stride: int,
        bfloat16: bool,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        sums: NDArray[np.float32] | None = None,
    ) -> None: ...

class Deal:
    """Number of blocks to select.

    Args:
        block: entries per block; the last block may have fewer.
        devices: number of devices, to which the blocks are dealt in turn.
        each: blocks to select of each device; all of them if it has fewer.
    """

    def __init__(self, block: int, devices: int, each: int) -> None: ...

def mass(
    codes: Codes,
    queries: NDArray[np.float32],
    scale: float,
    beside: NDArray[np.float32],
    threads: int,
) -> NDArray[np.float32]:
    """Estimates the attention of queries to entries, summed over heads; without the GIL.

    Args:
        queries: ``[queries, heads, head_dim]``; the heads of a KV head are consecutive.
        scale: factor of the logits.
        beside: log-sum-exp of the logits of all keys without codes, ``[queries, heads]``.

    Returns:
        ``[queries, entries]``.

    Raises:
        ValueError: the shapes do not match.
    """

def best_blocks(scores: NDArray[np.float32], deal: Deal) -> NDArray[np.int64]:
    """Selects the blocks with the largest sums of scores, equally many of each device.

    Runs without the GIL.

    Args:
        scores: ``[rows, entries]``.

    Returns:
        Numbers of the blocks, ``[rows, blocks]``, ascending in each row; of equal sums the first.

    Raises:
        ValueError: a number in ``deal`` is 0.
    """

def choose(
    codes: Codes,
    queries: NDArray[np.float32],
    scale: float,
    visible: Visible,
    deal: Deal,
    threads: int,
) -> NDArray[np.int64]:
    """Selects blocks as :func:`best_blocks` does by :func:`mass`; without the GIL.

    Args:
        queries: ``[rows, heads, head_dim]``.
        scale: factor of the logits.

    Returns:
        Numbers of the blocks, ``[rows, blocks]``, ascending in each row.

    Raises:
        ValueError: the shapes do not match, head_dim is not a multiple of 16, a row sees slots
            that do not exist, or a number in ``deal`` is 0.
    """

def step(
    frequency: NDArray[np.float64],
    place: NDArray[np.int64],
    held: NDArray[np.int64],
    decay: float,
    activated: NDArray[np.int64],
    there: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Updates which blocks stay in memory after a step; changes the first three arguments.

    Args:
        frequency: ``[blocks]``; multiplied by ``decay``, then increased by one for activated
            blocks.
        place: place of each block in memory, ``[blocks]``; -1 if it is not in memory.
        held: block in each place, ``[capacity]``.
        decay: factor of all frequencies.
        activated: blocks that the step activated.
        there: blocks that may be brought into memory.

    Returns:
        The blocks that were brought into memory.

    Raises:
        ValueError: a block does not exist, or the arrays differ in length.
    """

def table(
    first: NDArray[np.int64],
    block: int,
    pool: int,
    near: int,
    sinks: int,
    window: int,
    text: NDArray[np.int64] | None,
    slots: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Lists the slots that rows see: sinks, blocks, window and their own tokens.

    Args:
        first: first slot of each block, ``[rows, blocks]``.
        block: slots per block.
        pool: offset of these slots.
        near: slot of the first sink; the other sinks and the window follow it.
        sinks: number of sinks.
        window: number of slots of the window.
        text: order in which rows see the entries of their blocks, ``[blocks * block]``; None for
            the order of the blocks.
        slots: own slots, of which row ``i`` sees ``lengths[i]`` from ``starts[i]`` on.

    Returns:
        ``[rows, width]``, zero after the slots that a row sees.

    Raises:
        ValueError: the shapes do not match, or ``text`` has an invalid index.
    """
