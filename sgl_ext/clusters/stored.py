"""A context on devices: files of blocks, and an index that is kept in memory.

The index has the context's tokens, the K and V of its sinks and its window, and of every layer the
order in which its entries are stored, how often its blocks were activated, and codes of its keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.arrays import Arrays, Shapes, load, load_about
from sgl_ext.clusters.codes import CENTROIDS, Codes
from sgl_ext.clusters.files import block_file, require
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.recorded import Count, Geometry, Salt, as_float32
from sgl_ext.errors import ExtError
from sgl_ext.own_files import open_own

_Near = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class About(msgspec.Struct, frozen=True):
    """What an index says of its context."""

    geometry: Geometry
    tokens: Count
    sinks: _Near
    window: _Near
    devices: Count
    subspaces: Count
    """Bytes that are kept of a key, of each KV head."""
    salt: Salt | None = None
    """``cache_salt`` of the tenant; nobody else follows, sees or deletes the context."""

    def __post_init__(self) -> None:
        blocks = self.blocks
        if blocks.entries < 1 or blocks.entries % blocks.block:
            raise ValueError(
                f"{blocks.entries} entries behind sinks and window are no blocks of {blocks.block}"
            )
        if self.geometry.head_dim % self.subspaces:
            raise ValueError(f"{self.subspaces} codes of {self.geometry.head_dim} dimensions")

    @property
    def blocks(self) -> Blocks:
        """How the entries lie on the devices."""
        middle = self.tokens - self.sinks - self.window
        geometry = self.geometry
        return Blocks(middle, geometry.entry_bytes, self.devices, geometry.layers)

    def shapes(self) -> Shapes:
        """Returns the shapes of the index arrays: the tokens and each :class:`Layer`."""
        geometry, blocks = self.geometry, self.blocks
        layers, heads, width = geometry.layers, geometry.kv_heads, geometry.head_dim
        near = self.sinks + self.window
        return {
            "tokens": (np.int32, (self.tokens,)),
            "codes": (np.uint8, (layers, heads, blocks.entries, self.subspaces)),
            "centroids": (np.uint16, (layers, heads, width, CENTROIDS)),
            "projection": (np.float32, (layers, heads, width, width)),
            "mean": (np.float32, (layers, heads, width)),
            "order": (np.int32, (layers, blocks.entries)),
            "often": (np.int32, (layers, blocks.blocks)),
            "sums": (np.uint64, (layers, blocks.blocks)),
            "resident": (np.uint8, (layers, near, geometry.entry_bytes)),
        }


@dataclass(frozen=True)
class Layer:
    """What is in memory of a layer.

    Attributes:
        codes: of the keys, in the order of storage.
        order: ``[entries]`` int32; which entry of the middle is stored at each place.
        often: ``[blocks]`` int32; how many queries of the profile have activated any of a block's
            entries.
        sums: ``[blocks]`` uint64; their checksums.
        resident: ``[sinks + window, entry_bytes]`` uint8.
    """

    codes: Codes
    order: NDArray[np.int32]
    often: NDArray[np.int32]
    sums: NDArray[np.uint64]
    resident: NDArray[np.uint8]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], at: int) -> Layer:
        """One of those in the arrays of an index."""
        codes = Codes(*(arrays[key][at] for key in ("codes", "centroids", "projection", "mean")))
        return cls(codes, *(arrays[key][at] for key in ("order", "often", "sums", "resident")))


@dataclass(frozen=True)
class Stored:
    """A context that can be decoded over.

    Attributes:
        tokens: ``[n]`` int32.
        files: one for each device.
    """

    name: str
    about: About
    tokens: NDArray[np.int32]
    layers: tuple[Layer, ...]
    files: tuple[Path, ...]

    @classmethod
    def open(
        cls, name: str, folders: Sequence[Path], geometry: Geometry, longest: int | None = None
    ) -> Stored:
        """Reads the index of a context, and checks all of it and that its files are there.

        Whether a block is what was written is seen when it is read.

        Args:
            longest: tokens that the model takes; a context has fewer.

        Raises:
            UnknownContextError: it is not there.
            ExtError: it is damaged, or of another model; a file is missing or of another size.
        """

        def shapes(about: About) -> Shapes:
            if difference := geometry.difference(about.geometry):
                raise ExtError(
                    f"context {name} is not of this model ({difference}); store it again"
                )
            if longest is not None and about.tokens >= longest:
                raise ExtError(
                    f"context {name} has {about.tokens} tokens, the model takes less than {longest}"
                )
            require_files(name, about, folders)
            return about.shapes()

        arrays, about = load(require(name, folders), About, shapes)
        if wrong := out_of_range(arrays, geometry.dtype):
            raise ExtError(f"context {name} has {wrong}; store it again")
        layers = tuple(Layer.of(arrays, at) for at in range(geometry.layers))
        return cls(name, about, arrays["tokens"], layers, _files(name, folders))


def about(name: str, folders: Sequence[Path]) -> About:
    """Reads the header of a context's index.

    Raises:
        UnknownContextError: it is not there.
        DamagedError: that is no index.
    """
    return load_about(require(name, folders), About)


def require_files(name: str, about: About, folders: Sequence[Path]) -> None:
    """Raises ExtError unless the files of blocks are where they were written, as large as then."""
    if about.devices != len(folders):
        raise ExtError(
            f"context {name} lies on {about.devices} devices, {len(folders)} directories were "
            "named; name those that it was stored in, in that order"
        )
    for file in _files(name, folders):
        try:
            opened = open_own(file, os.O_RDONLY)
        except OSError as error:
            raise ExtError(
                f"context {name}: {file.name}: {error.strerror}; store it again"
            ) from None
        try:
            found = os.fstat(opened).st_size
        finally:
            os.close(opened)
        if found != about.blocks.file_bytes:
            raise ExtError(
                f"context {name}: {file.name} has {found:,} B, not {about.blocks.file_bytes:,}; "
                "store it again"
            )


def _files(name: str, folders: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(block_file(folder, name, at) for at, folder in enumerate(folders))


def out_of_range(arrays: Arrays, dtype: str) -> str:
    """Names a value of an index that is out of range; empty if all are in range.

    Args:
        arrays: of the shapes of :meth:`About.shapes`.
        dtype: of K and V.
    """
    order = arrays["order"]
    if not (np.sort(order) == np.arange(order.shape[1])).all():
        return "an order that is none of its entries"
    if (arrays["often"] < 0).any() or (arrays["tokens"] < 0).any():
        return "counts or token ids below zero"
    infinite = 0x7F80  # the exponent of bfloat16's infinities, and of what is no number
    if (arrays["centroids"] & infinite == infinite).any():
        return "centroids that are no numbers"
    if not all(np.isfinite(arrays[name]).all() for name in ("projection", "mean")):
        return "a projection or a mean that is no number"
    if not all(np.isfinite(as_float32(layer, dtype)).all() for layer in arrays["resident"]):
        return "sinks or a window that are no numbers"
    return ""
