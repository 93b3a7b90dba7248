"""Geometry of the KV of a model whose contexts are stored."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.slab import DTYPES

Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Salt = Annotated[str, msgspec.Meta(max_length=1 << 16)]

_MOST_LAYERS = 1 << 12  # bounds the number of arrays that a file may claim to have


class Geometry(msgspec.Struct, frozen=True):
    """Geometry of a model's KV, and the model that it belongs to."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=_MOST_LAYERS)]
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


def as_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Returns the numbers of a torch dtype whose bytes are ``raw``, as float32."""
    if dtype == "bfloat16":
        wide: NDArray[np.float32] = (raw.view("<u2").astype("<u4") << 16).view("<f4")
        return wide
    return raw.view({"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float32, copy=False)
