"""Which entries of a context its queries activate together (Swarm §5.1, step 1).

An entry is a token's K and V of one layer. A query activates the entries that have most of its
attention; what is kept is one bit for each entry and query, so that pairs are counted when they are
asked for, and no matrix of all pairs is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters

_SAMPLE = 256
_WORD = 64


@dataclass(frozen=True)
class Activations:
    """Of one layer.

    Attributes:
        bits: ``[entries, words]`` uint64; query ``q`` is bit ``q % 64`` of word ``q // 64``.
        queries: how many there are.
    """

    bits: NDArray[np.uint64]
    queries: int

    @classmethod
    def of(cls, mass: NDArray[np.float32], share: float) -> Activations:
        """Each query activates the entries that have most of its attention.

        Args:
            mass: ``[queries, entries]`` attention, summed over heads.
            share: of the entries, which each query activates; at least one.
        """
        queries, entries = mass.shape
        count = min(max(round(share * entries), 1), entries)
        active = np.zeros((queries, entries), bool)
        top = np.argpartition(mass, entries - count, axis=1)[:, entries - count :]
        np.put_along_axis(active, top, values=True, axis=1)
        padded = np.zeros((entries, -(-queries // _WORD) * _WORD), bool)
        padded[:, :queries] = active.T
        return cls(np.packbits(padded, axis=1, bitorder="little").view("<u8"), queries)

    @property
    def entries(self) -> int:
        return len(self.bits)

    @property
    def frequency(self) -> NDArray[np.int64]:
        """``[entries]`` queries that activate each."""
        counts: NDArray[np.int64] = np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)
        return counts

    def radius(self, neighbours: int, *, seed: int = 0) -> float:
        """The distance within which half of the active entries have so many neighbours.

        Estimated from some of them.
        """
        active = np.flatnonzero(self.frequency)
        if len(active) <= neighbours:
            return 1.0
        chance = np.random.default_rng(seed)
        sample = chance.permutation(active)[:_SAMPLE]
        # The nearest is the entry itself.
        nth = [
            np.partition(_clusters.distances(self.bits, int(entry)), neighbours)[neighbours]
            for entry in sample
        ]
        # Just beyond, for members are nearer than the radius.
        return float(np.nextafter(np.float32(np.median(nth)), np.float32(2.0)))


def attention_mass(
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    scale: float,
    beside: NDArray[np.float32],
    seen: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """The attention that queries pay to entries, summed over heads.

    Args:
        queries: ``[queries, heads, head_dim]``.
        keys: ``[entries, kv_heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``, and
            query heads of one KV head follow each other.
        scale: of logits.
        beside: ``[queries, heads]`` logarithm of the sum of the exponentials of all logits
            of other entries that the query sees; minus infinity if there are none.
        seen: ``[queries]`` how many of the first entries each query sees; all if not given.

    Returns:
        ``[queries, entries]``.
    """
    count, heads, _ = queries.shape
    entries, kv_heads, _ = keys.shape
    group = heads // kv_heads
    mass = np.zeros((count, entries), np.float32)
    hidden = None if seen is None else np.arange(entries) >= seen[:, None]
    for head in range(heads):
        logits = (queries[:, head] * scale) @ keys[:, head // group].T
        if hidden is not None:
            logits[hidden] = -np.inf
        highest = np.maximum(logits.max(axis=1), beside[:, head])[:, None]
        np.exp(logits - highest, out=logits)
        total = logits.sum(axis=1, keepdims=True) + np.exp(beside[:, head, None] - highest)
        mass += logits / total
    return mass


def log_sum(
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    scale: float,
    seen: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """``[queries, heads]``: logarithm of the sum of the exponentials of the logits of some keys.

    Args:
        queries: as for :func:`attention_mass`, and so are the others.
    """
    group = queries.shape[1] // keys.shape[1]
    logits = np.einsum("qhd,khd->qhk", queries * scale, keys.repeat(group, axis=1))
    if seen is not None:
        logits[
            np.broadcast_to((np.arange(len(keys)) >= seen[:, None])[:, None], logits.shape)
        ] = -np.inf
    highest = logits.max(axis=2, initial=np.finfo(np.float32).min)
    with np.errstate(divide="ignore"):  # of nothing it is minus infinity
        found: NDArray[np.float32] = highest + np.log(
            np.exp(logits - highest[..., None]).sum(axis=2)
        )
    return found
