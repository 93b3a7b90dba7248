"""Record of a context that a server has computed, from which it is stored on SSDs.

A record is a folder of parts, each written by one request: the KV of some of the context's tokens,
and queries that profile the context. A context that is larger than the KV pool has several parts
with KV, of which only one at a time was in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.about import About
from sgl_ext.clusters.arrays import ArrayFile, Shapes, save
from sgl_ext.clusters.geometry import Geometry, Salt, as_float32
from sgl_ext.clusters.paths import PART
from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from sgl_ext.clusters.stored_kv import StoredKV

_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _About(msgspec.Struct, frozen=True):
    """Description in the file of a part.

    Attributes:
        start: Number of the context's tokens before those of the part.
        tokens: Number of tokens whose KV the part has.
        queries: Number of queries that the part has.
    """

    geometry: Geometry
    start: _Number
    tokens: _Number
    queries: _Number
    salt: Salt | None

    def shapes(self) -> Shapes:
        """Returns the dtypes and shapes of the arrays of :class:`Part`."""
        geometry, tokens, queries = self.geometry, self.tokens, self.queries
        kv = (np.uint8, (tokens, geometry.entry_bytes))
        return {
            "tokens": (np.int32, (tokens,)),
            **{_kv(layer): kv for layer in range(geometry.layers)},
            "queries": (np.float32, (geometry.layers, queries, geometry.heads, geometry.head_dim)),
            "seen": (np.int64, (queries,)),
        }


def _kv(layer: int) -> str:
    """Returns the name of the array with the KV of a layer."""
    return f"kv.{layer}"


@dataclass(frozen=True)
class Part:
    """Part of the record of a context: KV and queries that one request has computed.

    Attributes:
        start: Number of the context's tokens before those of the part.
        tokens: Token ids, int32 ``[n]``; none if the part has queries only.
        kv: K of all heads, then V of all heads, as in the KV pool, of each layer, uint8
            ``[n, entry_bytes]``.
        queries: Queries that profile the context, float32 ``[layers, queries, heads, head_dim]``.
        seen: Number of the context's tokens that each query sees, int64 ``[queries]``.
        salt: ``cache_salt`` of the tenant; other tenants cannot follow the context.
    """

    geometry: Geometry
    start: int
    tokens: NDArray[np.int32]
    kv: Sequence[NDArray[np.uint8]]
    queries: NDArray[np.float32]
    seen: NDArray[np.int64]
    salt: str | None = None

    def save(self, path: Path) -> None:
        """Writes the part into a file, whose name ends with :data:`PART`.

        Raises:
            OSError: The file cannot be written.
        """
        about = _About(self.geometry, self.start, len(self.tokens), len(self.seen), self.salt)
        kv = {_kv(layer): each for layer, each in enumerate(self.kv)}
        save({"tokens": self.tokens, **kv, "queries": self.queries, "seen": self.seen}, path, about)


class RecordedKV(Sequence[NDArray[np.uint8]]):
    """KV of a record, or of its part that is recorded so far. Each layer is read when it is used.

    Args:
        folder: Folder of the record.
        end: Number of tokens before which the parts begin that are read; None for all parts.
        base: KV of the stored context that the recorded one continues, if any; the parts have only
            what comes behind it.

    Raises:
        ExtError: The folder cannot be read, a file is damaged, of another version or another
            user's, or the parts do not belong together.
    """

    def __init__(self, folder: Path, end: int | None = None, base: StoredKV | None = None) -> None:
        try:
            files = [
                ArrayFile(path, _About, _About.shapes) for path in sorted(folder.glob(f"*{PART}"))
            ]
        except OSError as error:
            raise ExtError(
                f"{folder.name} cannot be read: {error.strerror}; record the context again"
            ) from None
        files = [each for each in files if end is None or each.about.start < end]
        self.files = sorted(files, key=lambda each: (each.about.start, not each.about.tokens))
        """Files of the parts, in the order of the text; behind those with KV those without."""
        self.base = base
        if base is not None:
            first: _About | About = base.stored.about
            self.tokens = base.stored.about.tokens
        elif self.files:
            first, self.tokens = self.files[0].about, 0
        else:
            raise ExtError(
                f"{folder.name} is not a folder with the record of a context; record it again"
            )
        self.geometry, self.salt = first.geometry, first.salt
        for file in self.files:
            about = file.about
            if (about.geometry, about.salt) != (first.geometry, first.salt) or (
                about.tokens and about.start != self.tokens
            ):
                raise ExtError(f"{folder.name} lacks a part of the context; record it again")
            self.tokens += about.tokens

    def __len__(self) -> int:
        return self.geometry.layers

    @overload
    def __getitem__(self, at: int) -> NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, at: slice) -> list[NDArray[np.uint8]]: ...
    def __getitem__(self, at: int | slice) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        found = np.empty((self.tokens, self.geometry.entry_bytes), np.uint8)
        self.read(range(len(self))[at], found)
        return found

    def read(self, layer: int, into: NDArray[np.uint8]) -> None:
        """Reads the KV of a layer, uint8 ``[tokens, entry_bytes]``.

        Raises:
            ExtError: A file is damaged or cannot be read.
        """
        if self.base is not None:
            self.base.read(layer, into[: self.base.stored.about.tokens])
        for file in self.files:
            if count := file.about.tokens:
                start = file.about.start
                file.read(_kv(layer), into[start : start + count])


@dataclass(frozen=True)
class RecordedLayer:
    """One layer of a record.

    Attributes:
        kv: K and V, uint8 ``[n, entry_bytes]``.
        queries: Queries that profile the context, float32 ``[queries, heads, head_dim]``.
        seen: Number of the context's tokens that each query sees, int64 ``[queries]``.
    """

    geometry: Geometry
    number: int
    kv: NDArray[np.uint8]
    queries: NDArray[np.float32]
    seen: NDArray[np.int64]

    @cached_property
    def keys(self) -> NDArray[np.float32]:
        """Keys, float32 ``[n, kv_heads, head_dim]``."""
        geometry = self.geometry
        raw = np.ascontiguousarray(self.kv[:, : geometry.entry_bytes // 2])
        shape = (len(self.kv), geometry.kv_heads, geometry.head_dim)
        return as_float32(raw, geometry.dtype).reshape(shape)


@dataclass(frozen=True)
class Recorded:
    """Context that a model has computed, with queries that profile it.

    Attributes:
        tokens: Token ids, int32 ``[n]``.
        kv: K and V of each layer, uint8 ``[n, entry_bytes]``; see :class:`Part`.
        queries: See :class:`Part`.
        seen: See :class:`Part`.
        salt: See :class:`Part`.
    """

    geometry: Geometry
    tokens: NDArray[np.int32]
    kv: Sequence[NDArray[np.uint8]]
    queries: NDArray[np.float32]
    seen: NDArray[np.int64]
    salt: str | None = None

    def layer(self, number: int) -> RecordedLayer:
        """Returns a layer, whose KV is read now."""
        return RecordedLayer(
            self.geometry, number, self.kv[number], self.queries[number], self.seen
        )

    @classmethod
    def load(cls, folder: Path, base: StoredKV | None = None) -> Recorded:
        """Reads a record, except for its KV.

        Args:
            base: See :class:`RecordedKV`.

        Raises:
            ExtError: See :class:`RecordedKV`, or values are out of range.
        """
        kv = RecordedKV(folder, base=base)
        if not kv.files:
            raise ExtError(f"{folder.name} lacks a part of the context; record it again")
        known = [] if base is None else [base.stored.tokens]
        tokens = np.concatenate([*known, *(file.read("tokens") for file in kv.files)])
        seen = np.concatenate([file.read("seen") for file in kv.files])
        queries = np.concatenate([file.read("queries") for file in kv.files], axis=1)
        if not len(tokens) or not len(seen):
            raise ExtError(f"{folder.name} lacks a part of the context; record it again")
        if (seen < 0).any() or (seen > len(tokens)).any() or (tokens < 0).any():
            raise ExtError(
                f"{folder.name} has queries that attend to tokens outside the context, or negative "
                "token ids; record the context again"
            )
        return cls(kv.geometry, tokens, kv, queries, seen, kv.salt)
