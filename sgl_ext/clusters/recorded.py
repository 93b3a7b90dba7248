"""What a server writes down of a context that it has read, from which it is stored on SSDs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.arrays import load, save
from sgl_ext.memory.slab import DTYPES


class Geometry(msgspec.Struct, frozen=True):
    """Whose KV it is, and how its bytes are read."""

    layers: int
    heads: int
    """Of queries; those of one KV head follow each other."""
    kv_heads: int
    head_dim: int
    dtype: str
    """Name of the torch dtype of K and V."""
    scale: float
    """Of logits."""
    fingerprint: str
    """Of the model, its weights and the rank."""

    @property
    def entry_bytes(self) -> int:
        """K and V of a token, of one layer."""
        return 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype]

    def difference(self, other: Geometry) -> str:
        """The fields in which ``other`` differs, as ``field expected/found``; empty if equal."""
        return ", ".join(
            f"{field}: expected {ours}, found {theirs}"
            for field in self.__struct_fields__
            if (ours := getattr(self, field)) != (theirs := getattr(other, field))
        )


@dataclass(frozen=True)
class Recorded:
    """A context that a model has read.

    Attributes:
        tokens: ``[n]`` int32.
        kv: ``[layers, n, entry_bytes]`` uint8: K of all heads, then V, as they lie in the pool.
        queries: ``[layers, queries, heads, head_dim]`` float32, of those that profile it.
        seen: ``[queries]`` int64: how many of the tokens each query sees.
    """

    geometry: Geometry
    tokens: NDArray[np.int32]
    kv: NDArray[np.uint8]
    queries: NDArray[np.float32]
    seen: NDArray[np.int64]

    def keys(self, layer: int) -> NDArray[np.float32]:
        """``[n, kv_heads, head_dim]``."""
        geometry = self.geometry
        raw = np.ascontiguousarray(self.kv[layer, :, : geometry.entry_bytes // 2])
        shape = (len(self.tokens), geometry.kv_heads, geometry.head_dim)
        return as_float32(raw, geometry.dtype).reshape(shape)

    def save(self, path: Path) -> None:
        """Writes it into a file.

        Raises:
            OSError: it cannot be written.
        """
        arrays = vars(self).copy()
        save(arrays, path, arrays.pop("geometry"))

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Reads what :meth:`save` wrote.

        Raises:
            ExtError: it is no such file, or one of another version.
        """
        arrays, geometry = load(path, Geometry)
        return cls(geometry=geometry, **arrays)


def as_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The numbers in bytes, of a torch dtype."""
    if dtype == "bfloat16":
        wide: NDArray[np.float32] = (raw.view("<u2").astype("<u4") << 16).view("<f4")
        return wide
    return raw.view({"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32, copy=False)
