"""Record of a context that a server has computed, from which it is stored on SSDs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.arrays import Shapes, load, save
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import DTYPES

Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Salt = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class Geometry(msgspec.Struct, frozen=True):
    """Geometry of a model's KV, and the model that it belongs to."""

    layers: Count
    heads: Count
    """Number of query heads; those of a KV head are consecutive."""
    kv_heads: Count
    head_dim: Count
    dtype: str
    """Name of the torch dtype of K and V."""
    scale: float
    """Scale of the logits."""
    fingerprint: Annotated[str, msgspec.Meta(max_length=1024)]
    """Fingerprint of the model, its weights and the rank."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"the dtype of K and V is {self.dtype}, expected one of {', '.join(DTYPES)}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} KV heads"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"the scale of logits is {self.scale}, expected a finite number above 0"
            )

    @property
    def entry_bytes(self) -> int:
        """Bytes of the K and V of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype]

    def difference(self, other: Geometry) -> str:
        """Returns the fields in which ``other`` differs, with both values; empty if equal."""
        return ", ".join(
            f"{field}: expected {ours}, found {theirs}"
            for field in self.__struct_fields__
            if (ours := getattr(self, field)) != (theirs := getattr(other, field))
        )


class _About(msgspec.Struct, frozen=True):
    """Description in the file of a record."""

    geometry: Geometry
    tokens: Count
    queries: Count
    salt: Salt | None

    def shapes(self) -> Shapes:
        """Returns the dtypes and shapes of the arrays of :class:`Recorded`."""
        geometry, tokens, queries = self.geometry, self.tokens, self.queries
        return {
            "tokens": (np.int32, (tokens,)),
            "kv": (np.uint8, (geometry.layers, tokens, geometry.entry_bytes)),
            "queries": (np.float32, (geometry.layers, queries, geometry.heads, geometry.head_dim)),
            "seen": (np.int64, (queries,)),
        }


@dataclass(frozen=True)
class Recorded:
    """Context that a model has computed, with queries that profile it.

    Attributes:
        tokens: Token ids, int32 ``[n]``.
        kv: K of all heads, then V of all heads, as in the KV pool, uint8
            ``[layers, n, entry_bytes]``.
        queries: Queries that profile the context, float32 ``[layers, queries, heads, head_dim]``.
        seen: Number of the context's tokens that each query sees, int64 ``[queries]``.
        salt: ``cache_salt`` of the tenant; other tenants cannot follow the context.
    """

    geometry: Geometry
    tokens: NDArray[np.int32]
    kv: NDArray[np.uint8]
    queries: NDArray[np.float32]
    seen: NDArray[np.int64]
    salt: str | None = None

    def keys(self, layer: int) -> NDArray[np.float32]:
        """Returns the keys of a layer, float32 ``[n, kv_heads, head_dim]``."""
        geometry = self.geometry
        raw = np.ascontiguousarray(self.kv[layer, :, : geometry.entry_bytes // 2])
        shape = (len(self.tokens), geometry.kv_heads, geometry.head_dim)
        return as_float32(raw, geometry.dtype).reshape(shape)

    def save(self, path: Path) -> None:
        """Writes the record into a file.

        Raises:
            OSError: The file cannot be written.
        """
        about = _About(self.geometry, len(self.tokens), len(self.seen), self.salt)
        save({name: getattr(self, name) for name in about.shapes()}, path, about)

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Reads a record that :meth:`save` wrote.

        Raises:
            ExtError: The file is not a record, is of another version, belongs to another user, or
                has values that are out of range.
        """
        arrays, about = load(path, _About, _About.shapes)
        seen, tokens = arrays["seen"], arrays["tokens"]
        if (seen < 0).any() or (seen > about.tokens).any() or (tokens < 0).any():
            raise ExtError(
                f"{path.name} has queries that attend to tokens outside the context, or negative "
                "token ids; record the context again"
            )
        return cls(about.geometry, salt=about.salt, **arrays)


def as_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Returns the numbers of a torch dtype whose bytes are ``raw``, as float32."""
    if dtype == "bfloat16":
        wide: NDArray[np.float32] = (raw.view("<u2").astype("<u4") << 16).view("<f4")
        return wide
    return raw.view({"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32, copy=False)
