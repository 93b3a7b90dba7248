"""Clusters and blocks of KV entries that are activated together, and codes of keys."""

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

def blocks(bits: NDArray[np.uint64], block: int, window: int) -> NDArray[np.int32]:
    """All entries once, so that blocks of them are activated together; without the GIL.

    Each block begins with the entry nearest to the last of the one before and goes on with those
    nearest to its members on average; where none is near, with what is activated most often.

    Args:
        block: entries of one.
        window: of what is left when a block begins, as many of those that are activated most often
            are looked at; the time is that of ``entries * window`` distances.

    Raises:
        ValueError: a block of none, or a smaller window.
    """

def checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """One of each row; without the GIL."""

def mass(
    codes: NDArray[np.uint8],
    centroids: NDArray[np.uint16],
    projection: NDArray[np.float32],
    mean: NDArray[np.float32],
    queries: NDArray[np.float32],
    scale: float,
    beside: NDArray[np.float32],
    threads: int,
) -> NDArray[np.float32]:
    """The attention that queries pay to entries, summed over heads; without the GIL.

    Args:
        codes: ``[kv_heads, entries, subspaces]``.
        centroids: ``[kv_heads, head_dim, 256]`` bfloat16, as its bits: of each dimension of a
            subspace, what the centroids have; the dimensions of a subspace follow each other.
        projection: ``[kv_heads, head_dim, head_dim]``, that queries are multiplied by.
        mean: ``[kv_heads, head_dim]`` of the keys.
        queries: ``[queries, heads, head_dim]``; the heads of a KV head follow each other.
        scale: of logits.
        beside: ``[queries, heads]`` logarithm of the sum of the exponentials of the logits of
            all that has no codes.

    Returns:
        ``[queries, entries]``.

    Raises:
        ValueError: shapes that do not fit each other.
    """

def best_blocks(
    scores: NDArray[np.float32], block: int, devices: int, each: int
) -> NDArray[np.int64]:
    """The blocks of largest sums, as many of each device; without the GIL.

    Args:
        scores: ``[rows, entries]``.
        block: entries of one; the last may have fewer.
        devices: that blocks are dealt out to in turn.
        each: blocks that every device gives, or all that it has.

    Returns:
        ``[rows, blocks]`` numbers, of each row rising; of equal sums the first.

    Raises:
        ValueError: blocks of none, no device, or nothing of each.
    """

def choose(
    codes: NDArray[np.uint8],
    centroids: NDArray[np.uint16],
    projection: NDArray[np.float32],
    mean: NDArray[np.float32],
    queries: NDArray[np.float32],
    scale: float,
    near: int,
    near_stride: int,
    count: int,
    own: int,
    own_stride: int,
    slots: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    bfloat16: bool,
    block: int,
    devices: int,
    each: int,
    threads: int,
) -> NDArray[np.int64]:
    """What :func:`best_blocks` finds by :func:`mass`, beside what rows see anyway; without the GIL.

    Keys that are seen are ``[slots, kv_heads, head_dim]``, bfloat16 or float32, by address and
    stride (in elements); who calls keeps them, and has checked slots.

    Args:
        queries: ``[rows, heads, head_dim]``.
        near: keys that all rows see, the first ``count``.
        own: keys of which row ``i`` sees those at ``lengths[i]`` of ``slots`` from ``starts[i]``.

    Returns:
        ``[rows, blocks]`` numbers, of each row rising.

    Raises:
        ValueError: shapes that do not fit each other, or a head of no multiple of 16.
    """

def step(
    frequency: NDArray[np.float64],
    place: NDArray[np.int64],
    held: NDArray[np.int64],
    decay: float,
    activated: NDArray[np.int64],
    there: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Which blocks come into memory once a step has activated some; changes the first three.

    Args:
        frequency: ``[blocks]``; a step takes a part of all and adds one to the activated ones'.
        place: ``[blocks]`` of each in memory; -1 where it is not.
        held: ``[capacity]`` the block in each place.
        decay: what a step leaves of a frequency.
        there: blocks that can come in.

    Returns:
        Those that have.

    Raises:
        ValueError: a block that there is not, or arrays of different lengths.
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
    """Slots of all that rows see: sinks, blocks, window and tokens of their own.

    Args:
        first: ``[rows, blocks]`` first slot of each block.
        block: slots of one.
        pool: what is added to those.
        near: slot of the first sink; the others and the window follow it.
        text: entries of all blocks in the order in which rows see them; None for as they lie.
        slots: of which row ``i`` sees ``lengths[i]`` from ``starts[i]`` on.

    Returns:
        ``[rows, width]``, zero behind what a row sees.

    Raises:
        ValueError: shapes that do not fit each other.
    """
