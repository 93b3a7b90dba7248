"""A context on devices: files of blocks, and an index that is kept in memory.

``<directory>/<name>.<device>.blocks`` is in every directory, and ``<name>.index`` in the first one,
which is written last: without it the others are nothing. Of the blocks those of the first directory
are written first and removed last, so that a look into it tells of all that has been left. The
index has the context's tokens, the K and V of its sinks and its window, and of every layer the
order in which its entries are stored, how often its blocks were activated, and codes of its keys.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.arrays import load, load_about
from sgl_ext.clusters.codes import Codes
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.recorded import Geometry
from sgl_ext.errors import ExtError

PREFIX = "stx-"
"""Of the names that servers give."""
_INDEX, _RECORDED, _FAILED, _SCRATCH = ".index", ".recorded", ".failed", ".tmp"


class UnknownContextError(ExtError):
    """No context of that name is stored."""

    status = 404


class About(msgspec.Struct, frozen=True):
    """What an index says of its context."""

    geometry: Geometry
    tokens: int
    sinks: int
    window: int
    devices: int

    @property
    def blocks(self) -> Blocks:
        """How the entries lie on the devices."""
        middle = self.tokens - self.sinks - self.window
        geometry = self.geometry
        return Blocks(middle, geometry.entry_bytes, self.devices, geometry.layers)


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
    def open(cls, name: str, directories: Sequence[Path], geometry: Geometry) -> Stored:
        """Reads the index of a context and sees that its files are there.

        Whether a block is what was written is seen when it is read.

        Raises:
            UnknownContextError: it is not there.
            ExtError: it is of another model; a file is missing or too short.
        """
        arrays, about = load(require(name, directories), About)
        if difference := geometry.difference(about.geometry):
            raise ExtError(f"context {name} is not of this model ({difference}); store it again")
        if about.devices != len(directories):
            raise ExtError(
                f"context {name} lies on {about.devices} devices, {len(directories)} "
                "directories were named; name those that it was stored in, in that order"
            )
        files = tuple(block_file(directory, name, at) for at, directory in enumerate(directories))
        for file in files:
            try:
                found = file.stat().st_size
            except OSError as error:
                raise ExtError(f"context {name}: {error}; store it again") from None
            if found != about.blocks.file_bytes:
                raise ExtError(
                    f"context {name}: {file} has {found:,} B, not {about.blocks.file_bytes:,}; "
                    "store it again"
                )
        layers = tuple(
            Layer(
                Codes(*(arrays[key][at] for key in ("codes", "centroids", "projection", "mean"))),
                *(arrays[key][at] for key in ("order", "often", "sums", "resident")),
            )
            for at in range(geometry.layers)
        )  # fmt: skip
        return cls(name, about, arrays["tokens"], layers, files)


def about(name: str, directories: Sequence[Path]) -> About:
    """What a context is, by the first lines of its index.

    Raises:
        UnknownContextError: it is not there.
        ExtError: that is no index.
    """
    return load_about(require(name, directories), About)


def require(name: str, directories: Sequence[Path]) -> Path:
    """The index of a context.

    Raises:
        UnknownContextError: it is not there.
        ExtError: it cannot be looked for.
    """
    path = index_file(directories[0], name)
    try:
        path.stat()
    except FileNotFoundError:
        raise UnknownContextError(f"there is no stored context {name}") from None
    except OSError as error:
        raise ExtError(f"context {name} cannot be looked for: {error}") from None
    return path


def names(directories: Sequence[Path]) -> Iterator[str]:
    """Of all contexts that have an index."""
    for path in sorted(directories[0].glob(f"*{_INDEX}")):
        yield path.name.removesuffix(_INDEX)


def remove(name: str, directories: Sequence[Path]) -> None:
    """A context is no more, or has not come to be; its index goes first."""
    index_file(directories[0], name).unlink(missing_ok=True)
    _remove_written(name, directories[0])
    for at, directory in reversed([*enumerate(directories)]):
        block_file(directory, name, at).unlink(missing_ok=True)


def _remove_written(name: str, first: Path) -> None:
    """What is there of a context only while it is stored."""
    record, index = recorded_file(first, name), index_file(first, name)
    for path in (record, scratch_of(record), failed_file(first, name), scratch_of(index)):
        path.unlink(missing_ok=True)


@contextmanager
def storing(directory: Path) -> Iterator[None]:
    """Within it nobody sweeps contexts whose indexes are there.

    Raises:
        ExtError: somebody does at this moment.
    """
    with _locked(directory, fcntl.LOCK_SH) as ours:
        if not ours:
            raise ExtError(f"{directory} is being cleaned by a server that starts: try again")
        yield


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[bool]:
    fd = os.open(directory / f"{PREFIX}lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def sweep(directories: Sequence[Path]) -> list[str]:
    """Removes what contexts have left that have not come to be; returns their names.

    Nothing, if anybody is :func:`storing` one. What lies in further directories is left alone where
    the first one has never heard of it: it may not be mounted, or be another one than it was.
    """
    with _locked(directories[0], fcntl.LOCK_EX) as ours:
        return _sweep(directories) if ours else []


def _sweep(directories: Sequence[Path]) -> list[str]:
    first = directories[0]
    stored = set(names(directories))
    found = {
        path.name.partition(".")[0]
        for path in first.glob(f"{PREFIX}*")
        if path.name.endswith((".0.blocks", _RECORDED, _FAILED, _SCRATCH))
    }
    for name in found & stored:
        _remove_written(name, first)
    for name in found - stored:
        remove(name, directories)
    return sorted(found - stored)


def new_id(name: str = "") -> str:
    """Of a context; no two are ever alike, since requests' KV is cached under it.

    Args:
        name: what it begins with, for people to know it by.
    """
    return PREFIX + (f"{name}-" if name else "") + secrets.token_urlsafe(12)


def scratch_of(path: Path) -> Path:
    """What a file is written under until it is whole."""
    return path.with_name(path.name + _SCRATCH)


def index_file(directory: Path, name: str) -> Path:
    return directory / f"{name}{_INDEX}"


def recorded_file(directory: Path, name: str) -> Path:
    return directory / f"{name}{_RECORDED}"


def failed_file(directory: Path, name: str) -> Path:
    """Why there is no record, in a line."""
    return directory / f"{name}{_FAILED}"


def block_file(directory: Path, name: str, device: int) -> Path:
    return directory / f"{name}.{device}.blocks"
