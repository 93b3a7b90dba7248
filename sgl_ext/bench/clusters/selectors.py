"""Ways to choose what a query reads of a context: ours, the paper's, and those of others.

All are asked for so many entries, and rank them by an estimate of the attention that a layer's
heads pay together. What a method keeps in memory for that is its index.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2  # type: ignore[import-untyped]

from sgl_ext.bench.clusters.samples import Layer
from sgl_ext.clusters.activations import attention_mass
from sgl_ext.clusters.clustering import Clusters, Mode, cluster
from sgl_ext.clusters.codes import CENTROIDS, Codes, bfloat16
from sgl_ext.clusters.selection import best_blocks, best_clusters

Mask = NDArray[np.bool_]
"""``[queries, entries]``: what each query is given."""
Scores = NDArray[np.float32]

_POSITIONS = 16
"""Entries of a block by position, as InfLLM and Quest have them."""
_REPRESENTATIVES = 4
_ROUNDS = 10
DEVICES = 8
_NUMBER = 4
"""Bytes of an entry's number."""
_OF_BLOCK = 12
"""Bytes that we keep of a block: its checksum, and how often it was activated."""


class Selector(Protocol):
    """Chooses entries for the queries of a layer."""

    @property
    def index_bytes(self) -> float:
        """What has to be in memory."""
        ...

    def select(self, budget: int) -> Mask:
        """About ``budget`` entries for each query."""
        ...


def top(scores: Scores, count: int) -> Mask:
    """The ``count`` highest of each row."""
    count = min(count, scores.shape[1])
    found = np.zeros(scores.shape, bool)
    best = np.argpartition(scores, scores.shape[1] - count, axis=1)[:, -count:]
    np.put_along_axis(found, best, values=True, axis=1)
    return found


@dataclass(frozen=True)
class Entries:
    """One by one, by ``scores`` of each."""

    scores: Scores
    index_bytes: float

    def select(self, budget: int) -> Mask:
        return top(self.scores, budget)


@dataclass(frozen=True)
class Positions:
    """Blocks of entries that follow each other in the text, by ``scores`` of each block."""

    scores: Scores
    entries: int
    index_bytes: float

    def select(self, budget: int) -> Mask:
        blocks = top(self.scores, max(round(budget / _POSITIONS), 1))
        return blocks.repeat(_POSITIONS, axis=1)[:, : self.entries]


@dataclass(frozen=True)
class Together:
    """Blocks of entries that are stored together, as many of each device: what we do.

    Attributes:
        scores: in the order of storage.
    """

    scores: Scores
    order: NDArray[np.int32]
    block: int
    index_bytes: float

    def select(self, budget: int) -> Mask:
        found = np.zeros(self.scores.shape, bool)
        share = budget / self.scores.shape[1]
        blocks = best_blocks(self.scores, share, block=self.block, devices=DEVICES)
        entries = self.order.reshape(-1, self.block)[blocks]
        np.put_along_axis(found, entries.reshape(len(found), -1), values=True, axis=1)
        return found


@dataclass(frozen=True)
class Clustered:
    """Clusters, by ``scores`` of each."""

    scores: Scores
    clusters: Clusters
    entries: int
    index_bytes: float

    def chosen(self, budget: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Of each query the clusters and their entries."""
        return [best_clusters(scores, self.clusters, budget) for scores in self.scores]

    def select(self, budget: int) -> Mask:
        found = np.zeros((len(self.scores), self.entries), bool)
        for row, (clusters, entries) in enumerate(self.chosen(budget)):
            over = len(entries) - budget
            found[row, entries] = True
            if over > 0:  # of the last cluster those that are farthest from its medoid
                last = self.clusters.members[slice(*self.clusters.starts[clusters[-1] :][:2])]
                before = [
                    self.clusters.members[slice(*self.clusters.starts[one:][:2])]
                    for one in clusters[:-1]
                ]
                new = last[~np.isin(last, np.concatenate(before))] if before else last
                found[row, new[max(len(new) - over, 0) :]] = False
        return found


def exact(layer: Layer) -> Selector:
    """The entries that do get most attention: an oracle, which has read all keys."""
    return Entries(layer.mass, _key_bytes(layer) * len(layer.keys))


def ours(layer: Layer) -> Together:
    """Blocks of co-activated entries by codes in the metric of the queries."""
    codes = layer.profile.codes
    scores = codes.mass(layer.queries, layer.scale, layer.beside)
    index = codes.bytes + (_NUMBER + _OF_BLOCK / layer.block) * len(layer.keys)
    return Together(scores, layer.profile.order, layer.block, index)


def by_position(layer: Layer) -> Selector:
    """As ours, but entries lie in the order of the text."""
    text = np.arange(len(layer.keys), dtype=np.int32)
    return Together(_in_text(ours(layer)), text, layer.block, layer.profile.codes.bytes)


def coded_entries(layer: Layer) -> Selector:
    """Entries one by one by the same codes as ours."""
    return Entries(_in_text(ours(layer)), layer.profile.codes.bytes)


def _in_text(stored: Together) -> Scores:
    """Scores in the order of the text."""
    scores = np.empty_like(stored.scores)
    scores[:, stored.order] = stored.scores
    return scores


def clustered(mode: Mode, most: int = 16) -> Callable[[Layer], Clustered]:
    """Swarm: clusters of co-activated entries, by their medoids.

    Args:
        most: members of a capped cluster.
    """

    def selector(layer: Layer) -> Clustered:
        clusters = cluster(layer.profile.activations, mode, most=most)
        medoids = layer.keys[clusters.medoids]
        scores = attention_mass(layer.queries, medoids, layer.scale, layer.beside)
        index = _key_bytes(layer) * len(clusters) + _NUMBER * len(clusters.members)
        return Clustered(scores, clusters, len(layer.keys), index)

    return selector


def infllm(layer: Layer, representatives: int = _REPRESENTATIVES) -> Selector:
    """Blocks by position by the keys that the context's own queries look at most (InfLLM)."""
    count = len(layer.keys)
    blocks = -(-count // _POSITIONS)
    received = np.full(blocks * _POSITIONS, -1, np.float32)
    received[:count] = layer.profile.received
    best = np.argsort(-received.reshape(blocks, _POSITIONS), axis=1, kind="stable")
    chosen = best[:, :representatives] + _POSITIONS * np.arange(blocks)[:, None]
    there = chosen < count
    keys = layer.keys[np.minimum(chosen, count - 1).ravel()]
    mass = attention_mass(layer.queries, keys, layer.scale, layer.beside)
    scores = (mass.reshape(-1, blocks, representatives) * there).sum(axis=2)
    return Positions(scores, count, _key_bytes(layer) * blocks * representatives)


def mean_keys(layer: Layer) -> Selector:
    """Blocks by position by the mean of their keys."""
    count = len(layer.keys)
    starts = np.arange(0, count, _POSITIONS)
    sizes = np.diff(starts, append=count)
    means = np.add.reduceat(layer.keys, starts, dtype=np.float32)
    means /= sizes[:, None, None]
    scores = attention_mass(layer.queries, means, layer.scale, layer.beside)
    return Positions(scores, count, _key_bytes(layer) * len(starts))


def quest(layer: Layer) -> Selector:
    """Blocks by position by a bound of their logits (Quest)."""
    starts = np.arange(0, len(layer.keys), _POSITIONS)
    low = np.minimum.reduceat(layer.keys, starts)
    high = np.maximum.reduceat(layer.keys, starts)
    group = layer.queries.shape[1] // low.shape[1]
    queries = layer.queries * layer.scale
    scores = np.zeros((len(queries), len(starts)), np.float32)
    for head in range(queries.shape[1]):
        asked, kv = queries[:, head], head // group
        bound = np.maximum(asked, 0) @ high[:, kv].T + np.minimum(asked, 0) @ low[:, kv].T
        highest = np.maximum(bound.max(axis=1), layer.beside[:, head])[:, None]
        weights = np.exp(bound - highest)
        beside = np.exp(layer.beside[:, head, None] - highest)
        scores += weights / (weights.sum(axis=1, keepdims=True) + beside)
    return Positions(scores, len(layer.keys), 2 * _key_bytes(layer) * len(starts))


def pqcache(layer: Layer) -> Selector:
    """Entries one by one by codes of the keys as they are (PQCache), as many bytes as ours."""
    count, kv_heads, head_dim = layer.keys.shape
    subspaces = layer.profile.codes.codes.shape[2]
    width = head_dim // subspaces
    codes = np.empty((kv_heads, count, subspaces), np.uint8)
    centroids = np.zeros((kv_heads, head_dim, CENTROIDS), np.uint16)
    for head in range(kv_heads):
        for at in range(subspaces):
            mine = slice(at * width, (at + 1) * width)
            codes[head, :, at], found = _k_means(layer.keys[:, head, mine], min(CENTROIDS, count))
            centroids[head, mine, : len(found)], _ = bfloat16(found.T)
    projection = np.broadcast_to(np.eye(head_dim, dtype=np.float32), (kv_heads, head_dim, head_dim))
    mean = np.zeros((kv_heads, head_dim), np.float32)
    found_codes = Codes(codes, centroids, np.ascontiguousarray(projection), mean)
    scores = found_codes.mass(layer.queries, layer.scale, layer.beside)
    return Entries(scores, codes.nbytes + centroids.nbytes)


def k_means(layer: Layer) -> Selector:
    """Clusters of like keys by their centroids, with an index as large as ours."""
    count = len(layer.keys)
    size = max(int(layer.profile.codes.bytes / _key_bytes(layer)), 1)
    points = layer.keys.reshape(count, -1)
    of, centroids = _k_means(points, min(size, count))
    order = np.lexsort((np.square(points - centroids[of]).sum(axis=1), of))  # the nearest first
    kinds, starts = np.unique(of[order], return_index=True)
    clusters = Clusters(np.append(starts, count), order.astype(np.int32), 0.0)
    keys = centroids[kinds].reshape(len(kinds), *layer.keys.shape[1:]).astype(np.float32)
    scores = attention_mass(layer.queries, keys, layer.scale, layer.beside)
    return Clustered(scores, clusters, count, _key_bytes(layer) * len(kinds) + _NUMBER * count)


def static(layer: Layer) -> Selector:
    """What the profile's queries look at most, whatever is asked."""
    often = layer.profile.activations.frequency.astype(np.float32)
    scores = np.broadcast_to(often, (len(layer.queries), len(often)))
    return Entries(scores, _NUMBER * len(often))


def _k_means(
    points: NDArray[np.float32], size: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Of each point its centroid, and the centroids."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a centroid has no point any more
        centroids, of = kmeans2(points, size, _ROUNDS, minit="points", rng=np.random.default_rng(0))
    return of, centroids


def _key_bytes(layer: Layer) -> float:
    """Of a key of all KV heads as it is stored: a float16's or a bfloat16's size."""
    _, kv_heads, head_dim = layer.keys.shape
    return 2.0 * float(kv_heads * head_dim)


OURS, FAITHFUL, CAPPED = "ours", "Swarm as written", "Swarm, capped clusters"
MEDOID_ONLY, NO_REPLICA = "Swarm, medoids only", "Swarm, no replicas"
EXACT, INFLLM, PQCACHE, QUEST = "exact top-k", "InfLLM", "PQCache", "Quest"
MEAN_KEYS, K_MEANS = "mean keys of 16", "k-means"
CODED, POSITION, STATIC = "ours, entry by entry", "ours, by position", "static hot set"

SELECTORS: dict[str, Callable[[Layer], Selector]] = {
    OURS: ours,
    CODED: coded_entries,
    POSITION: by_position,
    FAITHFUL: clustered("faithful"),
    MEDOID_ONLY: clustered("medoid-only"),
    NO_REPLICA: clustered("no-replica"),
    CAPPED: clustered("capped"),
    K_MEANS: k_means,
    PQCACHE: pqcache,
    QUEST: quest,
    INFLLM: infllm,
    MEAN_KEYS: mean_keys,
    STATIC: static,
    EXACT: exact,
}
