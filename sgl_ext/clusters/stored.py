"""A context on devices: files of blocks, and an index that is kept in memory.

``<directory>/<name>.<device>.blocks`` is in every directory, and ``<name>.index`` in the first one,
which is written last: without it the others are nothing. The index has the context's tokens, the K
and V of its sinks and its window, and of every layer the order in which its entries are stored, how
often its blocks were activated, and codes of its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from sgl_ext.clusters.arrays import load, load_about
from sgl_ext.clusters.codes import Codes
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.recorded import Geometry
from sgl_ext.errors import ExtError

_CHUNK = 4 << 20
_INDEX = ".index"


class UnknownContextError(ExtError):
    """No context of that name is stored."""

    status = 404


class About(msgspec.Struct, frozen=True):
    """What an index says of its context."""

    geometry: Geometry
    tokens: int
    sinks: int
    window: int
    digests: tuple[str, ...]
    """Of each device's file."""

    @property
    def blocks(self) -> Blocks:
        """How the entries lie on the devices."""
        middle = self.tokens - self.sinks - self.window
        geometry = self.geometry
        return Blocks(middle, geometry.entry_bytes, len(self.digests), geometry.layers)


@dataclass(frozen=True)
class Layer:
    """What is in memory of a layer.

    Attributes:
        codes: of the keys, in the order of storage.
        order: ``[entries]`` int32; which entry of the middle is stored at each place.
        often: ``[blocks]`` int32; how often the profile has activated each block's entries.
        resident: ``[sinks + window, entry_bytes]`` uint8.
    """

    codes: Codes
    order: NDArray[np.int32]
    often: NDArray[np.int32]
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

    @property
    def index_bytes(self) -> int:
        """That are in memory to select with; K and V of sinks and window are not counted."""
        return sum(layer.codes.bytes + layer.order.nbytes for layer in self.layers)

    @classmethod
    def open(cls, name: str, directories: Sequence[Path], geometry: Geometry) -> Stored:
        """Reads the index of a context and makes sure that its blocks are there, unharmed.

        Raises:
            UnknownContextError: it is not there.
            ExtError: it is of another model; a file is missing or not what was written.
        """
        arrays, about = load(_existing(name, directories), About)
        if difference := geometry.difference(about.geometry):
            raise ExtError(f"context {name} is not of this model ({difference}); store it again")
        if len(about.digests) != len(directories):
            raise ExtError(
                f"context {name} lies on {len(about.digests)} devices, {len(directories)} "
                "directories were named; name those that it was stored in, in that order"
            )
        files = tuple(block_file(directory, name, at) for at, directory in enumerate(directories))
        for file, expected in zip(files, about.digests, strict=True):
            try:
                found = digest(file)
            except OSError as error:
                raise ExtError(f"context {name}: {error}; store it again") from None
            if found != expected:
                raise ExtError(f"context {name}: {file} is not what was written; store it again")
        layers = tuple(
            Layer(
                Codes(*(arrays[key][at] for key in ("codes", "centroids", "projection"))),
                arrays["order"][at], arrays["often"][at], arrays["resident"][at],
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
    return load_about(_existing(name, directories), About)


def _existing(name: str, directories: Sequence[Path]) -> Path:
    path = index_file(directories[0], name)
    if not path.exists():
        raise UnknownContextError(f"there is no stored context {name}")
    return path


def names(directories: Sequence[Path]) -> Iterator[str]:
    """Of all contexts that have an index."""
    for path in sorted(directories[0].glob(f"*{_INDEX}")):
        yield path.name.removesuffix(_INDEX)


def remove(name: str, directories: Sequence[Path]) -> None:
    """A context is no more, or has not come to be; its index goes first."""
    index_file(directories[0], name).unlink(missing_ok=True)
    for at, directory in enumerate(directories):
        block_file(directory, name, at).unlink(missing_ok=True)
    recorded_file(directories[0], name).unlink(missing_ok=True)


def index_file(directory: Path, name: str) -> Path:
    return directory / f"{name}{_INDEX}"


def recorded_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.recorded"


def block_file(directory: Path, name: str, device: int) -> Path:
    return directory / f"{name}.{device}.blocks"


def digest(path: Path) -> str:
    """Of a file's contents."""
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
