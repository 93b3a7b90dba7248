"""Co-activation of a context's entries by its queries (Swarm §5.1, step 1).

An entry is the K and V of one token in one layer. A query activates the entries that receive most
of its attention. One bit is kept for each entry and query. Pairs are counted on demand, so no
matrix of all pairs is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WORD = 64


@dataclass(frozen=True)
class Activations:
    """Activations of the entries of one layer.

    Attributes:
        bits: Activations, uint64 ``[entries, words]``; query ``q`` is bit ``q % 64`` of word
            ``q // 64``.
        queries: Number of queries.
    """

    bits: NDArray[np.uint64]
    queries: int

    @classmethod
    def of(cls, masses: Iterable[NDArray[np.float32]], share: float) -> Activations:
        """Returns activations: each query activates the entries with most of its attention.

        Args:
            masses: Attention summed over heads, float32 ``[queries, entries]``. Each array has
                some of the queries, so that no array has all queries and all entries. An entry
                without attention is not activated.
            share: Share of the entries that each query activates; at least one entry.
        """
        words, queries = [], 0
        left = None  # activations by queries that do not fill a word yet
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
    def words(self) -> int:
        """Words of the bits of each entry."""
        return int(self.bits.shape[1])

    @property
    def frequency(self) -> NDArray[np.int64]:
        """Number of queries that activate each entry, int64 ``[entries]``."""
        counts: NDArray[np.int64] = np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64)
        return counts


def _most(mass: NDArray[np.float32], share: float) -> NDArray[np.bool_]:
    entries = mass.shape[1]
    count = min(max(round(share * entries), 1), entries)
    active = np.zeros(mass.shape, bool)
    top = np.argpartition(mass, entries - count, axis=1)[:, entries - count :]
    np.put_along_axis(active, top, values=True, axis=1)
    return active & (mass > 0)


def _packed(active: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Packs ``[queries, entries]``, whose queries fill whole words, to ``[entries, words]``."""
    return np.packbits(np.ascontiguousarray(active.T), axis=1, bitorder="little").view("<u8")


def attention_mass(
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    scale: float,
    beside: NDArray[np.float32],
    seen: NDArray[np.int64] | None = None,
    counted: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """Returns the attention of queries to entries, summed over heads.

    Args:
        queries: Queries, ``[queries, heads, head_dim]``.
        keys: Keys of the entries, ``[entries, kv_heads, head_dim]``. ``heads`` is a multiple of
            ``kv_heads``, and the query heads of a KV head are consecutive.
        scale: Scale of the logits.
        beside: Logarithm of the sum of the exponentials of the logits of all other entries that a
            query sees, ``[queries, heads]``; minus infinity if there are none.
        seen: Number of the first entries that each query sees, ``[queries]``; all if None.
        counted: Number of the first entries whose attention is returned for each query,
            ``[queries]``; all if None. The attention to the others is returned as zero.

    Returns:
        Attention, float32 ``[queries, entries]``.
    """
    count, heads, _ = queries.shape
    entries, kv_heads, _ = keys.shape
    group = heads // kv_heads
    mass = np.zeros((count, entries), np.float32)
    # No query hides an entry before the `first` one.
    first = entries if seen is None else int(seen.min(initial=entries))
    hidden = None if seen is None else np.arange(first, entries) >= seen[:, None]
    for head in range(heads):
        logits = (queries[:, head] * scale) @ keys[:, head // group].T
        if hidden is not None:
            logits[:, first:][hidden] = -np.inf
        highest = np.maximum(logits.max(axis=1), beside[:, head])[:, None]
        logits -= highest
        np.exp(logits, out=logits)
        total = logits.sum(axis=1, keepdims=True) + np.exp(beside[:, head, None] - highest)
        logits *= 1 / total
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
    """Returns the logarithm of the sum of the exponentials of the logits, ``[queries, heads]``.

    The arguments are those of :func:`attention_mass`. The result is minus infinity for a query that
    sees no key.
    """
    group = queries.shape[1] // keys.shape[1]
    logits = np.einsum("qhd,khd->qhk", queries * scale, keys.repeat(group, axis=1))
    if seen is not None:
        logits[
            np.broadcast_to((np.arange(len(keys)) >= seen[:, None])[:, None], logits.shape)
        ] = -np.inf
    highest = logits.max(axis=2, initial=np.finfo(np.float32).min)
    with np.errstate(divide="ignore"):  # minus infinity for an empty sum
        found: NDArray[np.float32] = highest + np.log(
            np.exp(logits - highest[..., None]).sum(axis=2)
        )
    return found
