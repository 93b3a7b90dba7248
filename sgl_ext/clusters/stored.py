"""Stored context: files of blocks on devices, and an index that is kept in memory.

The index holds the context's tokens, the K and V of its sinks and its window, and for every layer
the order in which its entries are stored, how often its blocks were activated, checksums of its
blocks, and codes of its keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.about import About
from sgl_ext.clusters.arrays import (
    Arrays,
    DamagedError,
    Shapes,
    UnreadableError,
    load,
    load_about,
)
from sgl_ext.clusters.codes import Codes
from sgl_ext.clusters.files import require, unknown
from sgl_ext.clusters.geometry import Geometry, as_float32
from sgl_ext.clusters.paths import block_file
from sgl_ext.clusters.placement import Blocks
from sgl_ext.errors import ExtError
from sgl_ext.own_files import open_own

Found = TypeVar("Found")


@dataclass(frozen=True)
class Layer:
    """Data of a layer that is kept in memory.

    Attributes:
        codes: Codes of the keys, in the order of storage.
        order: Entry that is stored at each place, counted from the end of the sinks, int32
            ``[entries]``.
        often: Number of queries of the profile that activated any entry of each block, int32
            ``[blocks]``.
        sums: Checksums of the blocks, uint64 ``[blocks]``.
        resident: K and V of sinks and window, uint8 ``[sinks + window, entry_bytes]``.
    """

    codes: Codes
    order: NDArray[np.int32]
    often: NDArray[np.int32]
    sums: NDArray[np.uint64]
    resident: NDArray[np.uint8]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], at: int) -> Layer:
        """Returns layer ``at`` from the arrays of an index."""
        codes = Codes(*(arrays[key][at] for key in ("codes", "centroids", "projection", "mean")))
        return cls(codes, *(arrays[key][at] for key in ("order", "often", "sums", "resident")))


@dataclass(frozen=True)
class Stored:
    """Context that requests can decode over.

    Attributes:
        tokens: Token ids, int32 ``[n]``.
        files: Files of blocks, as numbered by :meth:`Blocks.place`.
        lost: Devices whose file is missing or has another size; there are copies of its blocks.
    """

    name: str
    about: About
    tokens: NDArray[np.int32]
    layers: tuple[Layer, ...]
    files: tuple[Path, ...]
    lost: frozenset[int] = frozenset()

    @classmethod
    def open(
        cls, name: str, folders: Sequence[Path], geometry: Geometry, longest: int | None = None
    ) -> Stored:
        """Reads and checks the index of a context, and checks that enough of its files exist.

        Blocks are verified only when they are read.

        Args:
            longest: Context length of the model, in tokens; the context must be shorter.

        Raises:
            UnknownContextError: The context does not exist.
            ExtError: The context is damaged, too long or of another model, or a file is missing or
                has another size.
        """

        lost: frozenset[int] = frozenset()

        def shapes(about: About) -> Shapes:
            if difference := geometry.difference(about.geometry):
                raise ExtError(
                    f"context {name} was not stored for this model ({difference}); store it again"
                )
            if longest is not None and about.tokens >= longest:
                raise ExtError(
                    f"context {name} has {about.tokens} tokens, but the model accepts fewer than "
                    f"{longest}; store a shorter context"
                )
            nonlocal lost
            lost = require_files(name, about, folders)
            return about.shapes()

        arrays, about = _first(require(name, folders), lambda path: load(path, About, shapes))
        if wrong := out_of_range(arrays, geometry.dtype):
            raise ExtError(f"context {name} has {wrong}; store it again")
        layers = tuple(Layer.of(arrays, at) for at in range(geometry.layers))
        files = files_of(name, about.blocks, folders)
        return cls(name, about, arrays["tokens"], layers, files, lost)


def about(name: str, folders: Sequence[Path]) -> About:
    """Reads the description in a context's index.

    Raises:
        UnknownContextError: The context does not exist.
        DamagedError: The file is not an index.
        UnreadableError: It is not known whether the file is an index.
    """
    return _first(require(name, folders), lambda path: load_about(path, About))


def about_of(name: str, folders: Sequence[Path], salt: str | None) -> About:
    """Reads the description of a tenant's context.

    Raises:
        UnknownContextError: The tenant has no such context.
        DamagedError: The file is not an index.
        UnreadableError: It is not known whether the file is an index.
    """
    found = about(name, folders)
    if (found.salt or None) != (salt or None):  # SGLang takes an empty salt for none
        raise unknown(name)
    return found


def require_no_loss(name: str, lost: Collection[int]) -> None:
    """Raises ExtError if devices have lost files of a context that is to be continued."""
    if lost:
        raise ExtError(
            f"context {name} cannot be continued: device {min(lost)} has lost its files; store it "
            "again"
        )


def _first(paths: Sequence[Path], read: Callable[[Path], Found]) -> Found:
    """Returns what is read from the first file that can be read and is not damaged.

    Raises:
        UnreadableError: There is none, and a file cannot be read.
        DamagedError: All files are damaged.
    """
    failed: list[ExtError] = []
    for path in paths:
        try:
            return read(path)
        except (DamagedError, UnreadableError) as error:
            failed.append(error)
    raise min(failed, key=lambda each: isinstance(each, DamagedError))


def require_files(name: str, about: About, folders: Sequence[Path]) -> frozenset[int]:
    """Checks that the files of blocks exist and have their original size.

    Returns:
        Devices without such a file; the other devices have copies of its blocks.

    Raises:
        ExtError: Blocks are missing, or the context is on another number of devices.
    """
    if about.devices != len(folders):
        raise ExtError(
            f"context {name} is stored on {about.devices} devices, but {len(folders)} directories "
            "are configured; configure the directories that it was stored in, in the same order"
        )
    lost = {}
    blocks = about.blocks
    for at, file in enumerate(files_of(name, blocks, folders)):
        device = at % blocks.devices
        try:
            opened = open_own(file, os.O_RDONLY)
        except OSError as error:
            lost[device] = f"{file.name}: {error.strerror}"
            continue
        try:
            found = os.fstat(opened).st_size
        finally:
            os.close(opened)
        if found != (expected := blocks.file_bytes[at]):
            lost[device] = f"{file.name} has {found:,} B, expected {expected:,} B"
    if len(lost) >= about.copies:
        raise ExtError(f"context {name}: {next(iter(lost.values()))}; store it again")
    return frozenset(lost)


def files_of(name: str, blocks: Blocks, folders: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the paths of a context's files of blocks, as numbered by :meth:`Blocks.place`."""
    return tuple(
        block_file(folder, name, device, extent)
        for extent in range(blocks.extents)
        for device, folder in enumerate(folders)
    )


def out_of_range(arrays: Arrays, dtype: str) -> str:
    """Returns the name of values of an index that are out of range; empty if there are none.

    Args:
        arrays: Arrays with the shapes of :meth:`About.shapes`.
        dtype: Name of the torch dtype of K and V.
    """
    order = arrays["order"]
    if not (np.sort(order) == np.arange(order.shape[1])).all():
        return "an order that is not a permutation of its entries"
    if (arrays["often"] < 0).any() or (arrays["tokens"] < 0).any():
        return "negative counts or token ids"
    infinite = 0x7F80  # exponent bits of infinities and NaNs in bfloat16
    if (arrays["centroids"] & infinite == infinite).any():
        return "centroids that are not finite"
    if not all(np.isfinite(arrays[name]).all() for name in ("projection", "mean")):
        return "a projection or a mean that is not finite"
    if not all(np.isfinite(as_float32(layer, dtype)).all() for layer in arrays["resident"]):
        return "sinks or a window that are not finite"
    return ""
