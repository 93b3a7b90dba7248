"""Codes of keys: a few bytes for each key, from which the attention to it is estimated.

Product quantisation in the metric of the queries: the mean is subtracted from the keys, which are
then rotated and stretched. The distance between two of them is then the root mean square, over the
queries of the profile, of the difference between their logits before scaling. Each key is split
into subspaces, and the nearest of 256 centroids is kept for each part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters

CENTROIDS = 256
_ROUNDS = 8
_TRAINED_ON = 16
"""Largest number of training keys for each centroid."""
_RIDGE = 1e-6
"""Share of the mean eigenvalue added to all eigenvalues, so that the stretch is invertible."""


@dataclass(frozen=True)
class Codes:
    """Codes of the keys of one layer.

    Attributes:
        codes: Nearest centroid in each subspace, uint8 ``[kv_heads, entries, subspaces]``.
        centroids: Value of each dimension in the centroids of its subspace, as bits of bfloat16,
            uint16 ``[kv_heads, head_dim, 256]``. The dimensions of a subspace are consecutive.
        projection: Matrix that queries are multiplied by, float32
            ``[kv_heads, head_dim, head_dim]``.
        mean: Mean of the keys, float32 ``[kv_heads, head_dim]``.
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
        """Computes codes of ``keys`` for queries that resemble ``queries``.

        Args:
            keys: Keys, ``[entries, kv_heads, head_dim]``.
            queries: Queries, ``[queries, heads, head_dim]``; the heads of a KV head are
                consecutive.
            subspaces: Codes of a key for each KV head; a divisor of ``head_dim``.
            seed: Seed of the choice of training keys and initial centroids.
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
            codes[head], centroids[head] = _coded(_parts(turned[:, order], subspaces), chance)
        return cls(codes, centroids, projection, mean)

    def with_more(self, keys: NDArray[np.float32]) -> Codes:
        """Returns these codes and those of further keys, ``[entries, kv_heads, head_dim]``.

        The further keys are encoded with the centroids of these.
        """
        kv_heads, _, subspaces = self.codes.shape
        more = np.empty((kv_heads, len(keys), subspaces), np.uint8)
        for head, bits in enumerate(self.centroids):
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            centroids = values.reshape(subspaces, -1, CENTROIDS).transpose(0, 2, 1)
            more[head] = _clusters.nearest(
                self._turned(keys, head), np.ascontiguousarray(centroids)
            ).T
        return replace(self, codes=np.concatenate([self.codes, more], axis=1))

    def fitted_to(self, keys: NDArray[np.float32], *, seed: int = 0) -> Codes:
        """Returns codes of other keys, ``[entries, kv_heads, head_dim]``, for the same queries.

        Args:
            seed: See :meth:`of`.
        """
        kv_heads, _, subspaces = self.codes.shape
        chance = np.random.default_rng(seed)
        codes = np.empty((kv_heads, len(keys), subspaces), np.uint8)
        found = replace(
            self, codes=codes, centroids=np.empty_like(self.centroids), mean=keys.mean(axis=0)
        )
        for head in range(kv_heads):
            turned = found._turned(keys, head)
            codes[head], found.centroids[head] = _coded(turned, chance)
        return found

    def _turned(self, keys: NDArray[np.float32], head: int) -> NDArray[np.float32]:
        """Returns projected keys of a KV head, ``[subspaces, entries, width]``."""
        # Products of projected keys and projected queries are those of keys and queries.
        stretch = np.linalg.inv(self.projection[head].astype(np.float64)).T
        turned = (keys[:, head] - self.mean[head]) @ stretch.astype(np.float32)
        return _parts(turned, self.codes.shape[2])

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
        """Returns an estimate of :func:`~sgl_ext.clusters.activations.attention_mass`."""
        return _clusters.mass(self.native, np.ascontiguousarray(queries), scale, beside, threads)

    @cached_property
    def native(self) -> _clusters.Codes:
        """The same codes for native code."""
        return _clusters.Codes(self.codes, self.centroids, self.projection, self.mean)


def _parts(turned: NDArray[np.float32], subspaces: int) -> NDArray[np.float32]:
    """Splits ``[entries, head_dim]`` into ``[subspaces, entries, width]``."""
    return np.ascontiguousarray(turned.reshape(len(turned), subspaces, -1).transpose(1, 0, 2))


def _coded(
    parts: NDArray[np.float32], chance: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Returns codes ``[entries, subspaces]`` and their centroids, as in :class:`Codes`."""
    subspaces, entries, width = parts.shape
    trained = parts[:, chance.permutation(entries)[: _TRAINED_ON * CENTROIDS]]
    bits, found = bfloat16(_k_means(trained, chance))
    centroids = np.zeros((subspaces * width, CENTROIDS), np.uint16)
    centroids[:, : found.shape[1]] = bits.transpose(0, 2, 1).reshape(subspaces * width, -1)
    return _clusters.nearest(parts, found).T.astype(np.uint8), centroids


def bfloat16(values: NDArray[np.float32]) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Rounds finite numbers to bfloat16; returns their bits, and their values as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return upper.astype(np.uint16), (upper << 16).view(np.float32)


def _query_metric(
    queries: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the matrices that keys and queries are multiplied by, ``[head_dim, head_dim]``.

    The products of keys and queries do not change.
    """
    moments = queries.T.astype(np.float64) @ queries / len(queries)
    values, vectors = np.linalg.eigh(moments)
    root = np.sqrt(np.maximum(values, 0.0) + (_RIDGE * values.mean() or 1.0))
    return (vectors * root).astype(np.float32), (vectors / root).astype(np.float32)


def _balanced(variance: NDArray[np.float32], subspaces: int) -> NDArray[np.int64]:
    """Returns an order of the dimensions that balances the variance of the subspaces.

    The products of the variances in the subspaces are similar (Ge et al., Optimized Product
    Quantization, §3.2).
    """
    width = len(variance) // subspaces
    parts: list[list[int]] = [[] for _ in range(subspaces)]
    logs = np.zeros(subspaces)
    least = variance[variance > 0].min(initial=np.inf)  # its logarithm counts as zero
    for dimension in np.argsort(-variance, kind="stable"):
        part = min((at for at in range(subspaces) if len(parts[at]) < width), key=logs.__getitem__)
        parts[part].append(int(dimension))
        logs[part] += np.log(max(variance[dimension] / least, 1.0))
    return np.concatenate(parts).astype(np.int64)


def _k_means(points: NDArray[np.float32], chance: np.random.Generator) -> NDArray[np.float32]:
    """Returns centroids of ``points`` by Lloyd's algorithm, ``[subspaces, centroids, width]``.

    Args:
        points: Points, ``[subspaces, points, width]``.
    """
    subspaces, count, width = points.shape
    size = min(CENTROIDS, count)
    centroids = points[:, chance.permutation(count)[:size]].copy()
    for _ in range(_ROUNDS):
        nearest = _clusters.nearest(points, centroids) + size * np.arange(subspaces)[:, None]
        members = np.bincount(nearest.ravel(), minlength=subspaces * size).reshape(subspaces, size)
        for at in range(width):
            sums = np.bincount(
                nearest.ravel(), points[:, :, at].ravel(), minlength=subspaces * size
            ).reshape(subspaces, size)
            moved = sums / np.maximum(members, 1)
            centroids[:, :, at] = np.where(members > 0, moved, centroids[:, :, at])
    return centroids
