"""A few bytes for each key, from which the attention to it is estimated.

Product quantisation in the metric of the queries: keys, less their mean, are turned and stretched
so that a distance between two of them is the difference of the logits that the profile's queries
have on average. Of each part of such a key the nearest of 256 centroids is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters

CENTROIDS = 256
_ROUNDS = 8
_TRAINED_ON = 16
"""Keys for each centroid, at most."""
_RIDGE = 1e-6
"""Of the mean eigenvalue, so that directions that no query has can be turned back."""


@dataclass(frozen=True)
class Codes:
    """Of the keys of one layer.

    Attributes:
        codes: ``[kv_heads, entries, subspaces]`` uint8.
        centroids: ``[kv_heads, head_dim, 256]`` bits of bfloat16: of each dimension what the
            centroids of its subspace have; the dimensions of a subspace follow each other.
        projection: ``[kv_heads, head_dim, head_dim]`` float32; turns queries.
        mean: ``[kv_heads, head_dim]`` float32 of the keys.
    """

    codes: NDArray[np.uint8]
    centroids: NDArray[np.uint16]
    projection: NDArray[np.float32]
    mean: NDArray[np.float32]

    @classmethod
    def of(
        cls,
        keys: NDArray[np.float32],
        queries: NDArray[np.float32],
        subspaces: int = 8,
        *,
        seed: int = 0,
    ) -> Codes:
        """Codes of ``keys``, good for queries like ``queries``.

        Args:
            keys: ``[entries, kv_heads, head_dim]``.
            queries: ``[queries, heads, head_dim]``; those of one KV head follow each other.
            subspaces: codes of a key; divides ``head_dim``.
        """
        entries, kv_heads, head_dim = keys.shape
        group = queries.shape[1] // kv_heads
        chance = np.random.default_rng(seed)
        codes = np.empty((kv_heads, entries, subspaces), np.uint8)
        centroids = np.zeros((kv_heads, head_dim, CENTROIDS), np.uint16)
        projection = np.empty((kv_heads, head_dim, head_dim), np.float32)
        mean = keys.mean(axis=0)
        for head in range(kv_heads):
            asked = queries[:, head * group : (head + 1) * group].reshape(-1, head_dim)
            stretch, projection[head] = _query_metric(asked)
            turned = (keys[:, head] - mean[head]) @ stretch
            order = _balanced(turned.var(axis=0), subspaces)
            projection[head] = projection[head][:, order]
            parts = turned[:, order].reshape(entries, subspaces, -1).transpose(1, 0, 2)
            trained = parts[:, chance.permutation(entries)[: _TRAINED_ON * CENTROIDS]]
            bits, found = bfloat16(_k_means(trained, chance))
            centroids[head, :, : found.shape[1]] = bits.transpose(0, 2, 1).reshape(head_dim, -1)
            codes[head] = _nearest(parts, found).T
        return cls(codes, centroids, projection, mean)

    @property
    def bytes(self) -> int:
        parts = self.codes, self.centroids, self.projection, self.mean
        return sum(part.nbytes for part in parts)

    def mass(
        self,
        queries: NDArray[np.float32],
        scale: float,
        beside: NDArray[np.float32],
        threads: int = 1,
    ) -> NDArray[np.float32]:
        """As :func:`~sgl_ext.clusters.activations.attention_mass`, estimated."""
        return _clusters.mass(
            self.codes, self.centroids, self.projection, self.mean, np.ascontiguousarray(queries),
            scale, beside, threads,
        )  # fmt: skip


def bfloat16(values: NDArray[np.float32]) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Bits of the nearest bfloat16 of finite numbers, and these as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return upper.astype(np.uint16), (upper << 16).view(np.float32)


def _query_metric(
    queries: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What keys and queries are multiplied by; the products of the two stay what they are."""
    moments = queries.T.astype(np.float64) @ queries / len(queries)
    values, vectors = np.linalg.eigh(moments)
    root = np.sqrt(np.maximum(values, 0.0) + (_RIDGE * values.mean() or 1.0))
    return (vectors * root).astype(np.float32), (vectors / root).astype(np.float32)


def _balanced(variance: NDArray[np.float32], subspaces: int) -> NDArray[np.int64]:
    """An order of the dimensions in which each subspace has as much to encode as the others.

    The products of their variances are alike (Ge et al., Optimized Product Quantization, §3.2).
    """
    width = len(variance) // subspaces
    parts: list[list[int]] = [[] for _ in range(subspaces)]
    logs = np.zeros(subspaces)
    least = variance[variance > 0].min(initial=np.inf)  # whose logarithm is taken for zero
    for dimension in np.argsort(-variance, kind="stable"):
        part = min((at for at in range(subspaces) if len(parts[at]) < width), key=logs.__getitem__)
        parts[part].append(int(dimension))
        logs[part] += np.log(max(variance[dimension] / least, 1.0))
    return np.concatenate(parts).astype(np.int64)


def _k_means(points: NDArray[np.float32], chance: np.random.Generator) -> NDArray[np.float32]:
    """``[subspaces, centroids, width]`` of ``[subspaces, points, width]``: Lloyd's, all at once.

    Libraries would take the subspaces one by one, with products too small to be fast.
    """
    subspaces, count, width = points.shape
    size = min(CENTROIDS, count)
    centroids = points[:, chance.permutation(count)[:size]].copy()
    for _ in range(_ROUNDS):
        nearest = _nearest(points, centroids) + size * np.arange(subspaces)[:, None]
        members = np.bincount(nearest.ravel(), minlength=subspaces * size).reshape(subspaces, size)
        for at in range(width):
            sums = np.bincount(
                nearest.ravel(), points[:, :, at].ravel(), minlength=subspaces * size
            ).reshape(subspaces, size)
            moved = sums / np.maximum(members, 1)
            centroids[:, :, at] = np.where(members > 0, moved, centroids[:, :, at])
    return centroids


def _nearest(points: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    """``[subspaces, points]``."""
    norms = np.square(centroids).sum(axis=2)[:, None, :] / 2
    found = np.empty(points.shape[:2], np.int64)
    for start in range(0, points.shape[1], _PIECE):
        piece = slice(start, start + _PIECE)
        found[:, piece] = (norms - points[:, piece] @ centroids.transpose(0, 2, 1)).argmin(axis=2)
    return found


_PIECE = 2048
"""Points that are compared at once."""
