"""Selectors of the entries of a context that a query reads: the server's, Swarm's and an oracle.

A selector has a budget of entries and ranks entries by estimated attention, summed over the heads
of a layer. Its index is the data that it keeps in memory for the estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.bench.clusters.clustering import Clusters, best_clusters, cluster
from sgl_ext.bench.clusters.samples import Layer
from sgl_ext.clusters.activations import attention_mass
from sgl_ext.clusters.selection import each_of

Mask = NDArray[np.bool_]
"""Entries that each query is given, bool ``[queries, entries]``."""
Scores = NDArray[np.float32]

DEVICES = 8
_NUMBER = 4
"""Bytes of an entry's number."""
_OF_BLOCK = 12
"""Bytes that the server's index has for a block: checksum and number of activations."""


class Selector(Protocol):
    """Selector of entries for the queries of a layer."""

    @property
    def index_bytes(self) -> float:
        """Size of the index, in bytes."""
        ...

    def select(self, budget: int) -> Mask:
        """Returns about ``budget`` entries for each query."""
        ...


def top(scores: Scores, count: int) -> Mask:
    """Returns a mask of the ``count`` highest scores of each row."""
    count = min(count, scores.shape[1])
    found = np.zeros(scores.shape, bool)
    best = np.argpartition(scores, scores.shape[1] - count, axis=1)[:, -count:]
    np.put_along_axis(found, best, values=True, axis=1)
    return found


@dataclass(frozen=True)
class Entries:
    """Selector of single entries by their ``scores``."""

    scores: Scores
    index_bytes: float

    def select(self, budget: int) -> Mask:
        return top(self.scores, budget)


@dataclass(frozen=True)
class Together:
    """Selector of stored blocks, equally many from each device, as in the server.

    Attributes:
        scores: scores of the entries, in the order of storage.
        order: numbers of the entries, in the order of storage.
        block: number of entries of a block.
    """

    scores: Scores
    order: NDArray[np.int32]
    block: int
    index_bytes: float

    def select(self, budget: int) -> Mask:
        found = np.zeros(self.scores.shape, bool)
        blocks = self.order.reshape(-1, self.block)
        each = each_of(budget / self.order.size, len(blocks), DEVICES)
        chosen = _clusters.best_blocks(self.scores, _clusters.Deal(self.block, DEVICES, each))
        np.put_along_axis(found, blocks[chosen].reshape(len(found), -1), values=True, axis=1)
        return found


@dataclass(frozen=True)
class Clustered:
    """Selector of clusters by their ``scores``."""

    scores: Scores
    clusters: Clusters
    entries: int
    index_bytes: float

    def chosen(self, budget: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Returns the selected clusters and their entries, for each query."""
        return [best_clusters(scores, self.clusters, budget) for scores in self.scores]

    def select(self, budget: int) -> Mask:
        found = np.zeros((len(self.scores), self.entries), bool)
        for row, (clusters, entries) in enumerate(self.chosen(budget)):
            over = len(entries) - budget
            found[row, entries] = True
            if over > 0:  # remove the members of the last cluster that are farthest from its medoid
                last = self.clusters.members[slice(*self.clusters.starts[clusters[-1] :][:2])]
                before = [
                    self.clusters.members[slice(*self.clusters.starts[one:][:2])]
                    for one in clusters[:-1]
                ]
                new = last[~np.isin(last, np.concatenate(before))] if before else last
                found[row, new[max(len(new) - over, 0) :]] = False
        return found


def exact(layer: Layer) -> Selector:
    """Returns an oracle that has all keys in memory and selects the entries with most attention."""
    return Entries(layer.mass, _key_bytes(layer) * len(layer.keys))


def ours(layer: Layer) -> Together:
    """Returns the selector of the server: blocks of co-activated entries, scored by codes."""
    codes = layer.profile.codes
    scores = codes.mass(layer.queries, layer.scale, layer.beside)
    index = codes.bytes + (_NUMBER + _OF_BLOCK / layer.block) * len(layer.keys)
    return Together(scores, layer.profile.order, layer.block, index)


def by_position(layer: Layer) -> Selector:
    """Returns the server's selector with entries that are stored in the order of the text."""
    text = np.arange(len(layer.keys), dtype=np.int32)
    return Together(_in_text(ours(layer)), text, layer.block, layer.profile.codes.bytes)


def coded_entries(layer: Layer) -> Selector:
    """Returns a selector of single entries by the server's codes."""
    return Entries(_in_text(ours(layer)), layer.profile.codes.bytes)


def _in_text(stored: Together) -> Scores:
    """Returns scores in the order of the text."""
    scores = np.empty_like(stored.scores)
    scores[:, stored.order] = stored.scores
    return scores


def swarm(layer: Layer) -> Clustered:
    """Returns a selector of clusters of co-activated entries by their medoids (Swarm §5)."""
    clusters = cluster(layer.profile.activations)
    medoids = layer.keys[clusters.medoids]
    scores = attention_mass(layer.queries, medoids, layer.scale, layer.beside)
    index = _key_bytes(layer) * len(clusters) + _NUMBER * len(clusters.members)
    return Clustered(scores, clusters, len(layer.keys), index)


def _key_bytes(layer: Layer) -> float:
    """Returns the bytes of an entry's keys of all KV heads, with 2 bytes per number."""
    _, kv_heads, head_dim = layer.keys.shape
    return 2.0 * float(kv_heads * head_dim)


OURS, FAITHFUL, EXACT = "ours", "Swarm as written", "exact top-k"
CODED, POSITION = "ours, entry by entry", "ours, by position"

SELECTORS: dict[str, Callable[[Layer], Selector]] = {
    OURS: ours,
    CODED: coded_entries,
    POSITION: by_position,
    FAITHFUL: swarm,
    EXACT: exact,
}
