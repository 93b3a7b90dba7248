"""Which entries of a context its queries activate together (Swarm §5.1, step 1).

An entry is a token's K and V of one layer. A query activates the entries that have most of its
attention; what is kept is one bit for each entry and query, so that pairs are counted when they are
asked for, and no matrix of all pairs is made.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    def of(cls, masses: Iterable[NDArray[np.float32]], share: float) -> Activations:
        """Each query activates the entries that have most of its attention.

        Args:
            masses: ``[queries, entries]`` attention, summed over heads, of some queries each, so
                that no array has all queries and all entries. What has none is not activated.
            share: of the entries, which each query activates; at least one.
        """
        words, queries = [], 0
        left = None  # of queries that fill no word yet
        for mass in masses:
            active = _most(mass, share)
            queries += len(active)
            left = active if left is None else np.concatenate([left, active])
            whole = len(left) // _WORD * _WORD
            words.append(_packed(left[:whole]))
            left = left[whole:]
        if left is not None and len(left):
            words.append(_packed(np.pad(left, ((0, _WORD - len(left)), (0, 0)))))
        return cls(np.ascontiguousarray(np.concatenate(words, axis=1)), queries)

    @property
    def entries(self) -> int:
        return len(self.bits)

    @property
    def words(self) -> int:
        """Of each entry's bits."""
        return int(self.bits.shape[1])

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
        # Just beyond, for members are nearer than the radius; never as far as those that share
        # no query.
        return min(float(np.nextafter(np.float32(np.median(nth)), np.float32(2.0))), 1.0)


def _most(mass: NDArray[np.float32], share: float) -> NDArray[np.bool_]:
    entries = mass.shape[1]
    count = min(max(round(share * entries), 1), entries)
    active = np.zeros(mass.shape, bool)
    top = np.argpartition(mass, entries - count, axis=1)[:, entries - count :]
    np.put_along_axis(active, top, values=True, axis=1)
    return active & (mass > 0)


def _packed(active: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """``[entries, words]`` of ``[queries, entries]``, whose queries fill words."""
    return np.packbits(np.ascontiguousarray(active.T), axis=1, bitorder="little").view("<u8")


def attention_mass(
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    scale: float,
    beside: NDArray[np.float32],
    seen: NDArray[np.int64] | None = None,
    counted: NDArray[np.int64] | None = None,
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
        counted: ``[queries]`` of how many of the first entries the attention is told; all if not
            given. The others are zero.

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
        logits -= highest
        np.exp(logits, out=logits)
        total = logits.sum(axis=1, keepdims=True) + np.exp(beside[:, head, None] - highest)
        logits /= total
        mass += logits
    if counted is not None:
        mass[np.arange(entries) >= counted[:, None]] = 0
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
