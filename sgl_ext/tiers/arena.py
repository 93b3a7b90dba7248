"""Host memory for pages of KV, each followed by a trailer that identifies the page.

A page leaves this process (to a file, to another machine) together with its trailer. A page that
is read back counts only if the trailer names the requested key, this layout and the checksum of
the page's bytes. An interrupted write, a foreign file or a reused slot on a disk is therefore a
miss.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.mapping import HUGE_PAGE, Mapping, create
from sgl_ext.memory.slab import Layout
from sgl_ext.tiers.layer_major import ALIGNMENT, parts_of

VERSION = 1
"""Version of the trailer and of the format of the stored pages."""
_MAGIC = int.from_bytes(b"sglxpage", "little")
TRAILER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("page_bytes", "<u4"),
        ("layout", "V16"),
        ("key", "V32"),
        ("sequence", "<u8"),
        ("checksum", "<u8"),
        ("seal", "<u8"),
    ]
)
"""Last bytes of a slot: ``checksum`` covers the page, ``seal`` the trailer's fields before it.

If a page has parts, each part has a checksum of its own before the trailer, and ``checksum`` covers
these checksums."""
_LAST = 1 << 62
"""Exclusive bound of valid sequence numbers; it guarantees that there is always a next one."""
_SEALED = TRAILER.fields["seal"][1]  # type: ignore[index]

_LOWER = "tiers.host.capacity (tiers.staging without a host tier), or --max-total-tokens"
"""Options to lower when an arena does not fit into memory, for the error message."""

Key = bytes
"""SHA-256 of the tokens of a page and of all tokens before it, in their namespace, chained as in
SGLang."""
Pages = NDArray[np.int64]
"""Indices of slots in an arena, shape ``[pages]``."""


def layout_digest(layout: Layout) -> bytes:
    """Returns 16 bytes that identify the trailer version and the layout of a page.

    The layout includes the fingerprint of the model, the weights and the tensor-parallel rank.
    """
    return hashlib.sha256(VERSION.to_bytes(4, "little") + msgspec.json.encode(layout)).digest()[:16]


class Arena:
    """Host memory with ``pages`` slots of ``stride`` bytes.

    A slot holds a page, padding, and the page's trailer at its end.

    Attributes:
        layout: Layout of a page: that of a block of the slab, or :class:`LayerMajor`.
        parts: Layers ``(first, end)`` of each part of a page; none if a page has no parts.
        digest: Result of :func:`layout_digest` for ``layout``.
        pages: Number of slots.
        stride: Bytes of a slot, a multiple of :data:`ALIGNMENT`.
        memory: All slots, uint8 ``[pages, stride]``.
        trailers: Trailers of all slots, a view of ``memory``, :data:`TRAILER` ``[pages]``.
        sums: Checksums of the parts, a view of ``memory``, uint64 ``[pages, parts]``.
    """

    def __init__(self, layout: Layout, pages: int, *, beside: int = 0) -> None:
        """Maps the memory of all slots, and asks the kernel for huge pages.

        Args:
            beside: Bytes of a slab in host memory that are not allocated yet.

        Raises:
            ExtError: ``pages`` is less than one, or the memory available is too small.
        """
        self.stride = stride_of(layout)
        if pages < 1:
            raise ExtError(
                f"an arena must hold at least one page of {self.stride:,} B (determined by model, "
                "dtype and page size); raise its capacity"
            )
        self.layout = layout
        self.parts = parts_of(layout)
        self.digest = layout_digest(layout)
        self.pages = pages
        self._sealing = threading.Lock()
        size = pages * self.stride
        fd = create("sgl_ext-arena", size, _LOWER, beside=beside)
        try:
            self._mapping = Mapping(fd, size, writable=True)
        finally:
            os.close(fd)
        self.memory = np.asarray(self._mapping).reshape(pages, self.stride)
        self.trailers = np.ndarray(
            (pages,), TRAILER, self.memory, self.stride - TRAILER.itemsize, (self.stride,)
        )
        before = self.stride - TRAILER.itemsize - 8 * len(self.parts)
        self.sums = np.ndarray(
            (pages, len(self.parts)), np.dtype("<u8"), self.memory, before, (self.stride, 8)
        )

    @property
    def address(self) -> int:
        """Address of slot 0 in this process."""
        return self._mapping.address

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.memory.size

    def extent(self, part: int | None) -> tuple[int, int]:
        """Returns the offset and the bytes of a part in its slot; of the slot if it is None.

        The last part extends to the end of the slot, and includes the checksums and the trailer.
        """
        if part is None:
            return 0, self.stride
        begin, end = self._bytes(part)
        return begin, (self.stride if part + 1 == len(self.parts) else end) - begin

    def back(self) -> int:
        """Backs the arena with physical huge pages, except for a remainder smaller than one.

        Returns:
            0 on success, otherwise the kernel's errno.
        """
        whole = self.size // HUGE_PAGE * HUGE_PAGE
        return self._mapping.collapse(0, whole) if whole else 0

    def seal(self, keys: Sequence[Key], pages: Pages, sequence: int) -> None:
        """Writes the trailers of ``pages``, which hold the KV of ``keys``.

        The sequence numbers are consecutive from ``sequence`` on, in the order of ``keys``. A page
        whose trailer already verifies for its key keeps its checksum.

        Thread-safe. If a page is sealed while it is written to a device, the device may receive a
        half-updated trailer, which does not verify.
        """
        with self._sealing:
            trailers = np.zeros(len(keys), TRAILER)
            trailers["magic"] = _MAGIC
            trailers["version"] = VERSION
            trailers["page_bytes"] = self.layout.block_bytes
            trailers["layout"] = np.void(self.digest)
            trailers["key"] = np.array(keys, "V32")
            trailers["sequence"] = sequence + np.arange(len(keys), dtype=np.uint64)
            whole = self.verify(keys, pages)
            trailers["checksum"][whole] = self.trailers[pages[whole]]["checksum"]
            for part in range(len(self.parts)):
                self.sums[pages[~whole], part] = self._part_sums(pages[~whole], part)
            trailers["checksum"][~whole] = self._checksums(pages[~whole])
            trailers["seal"] = seals(trailers)
            self.trailers[pages] = trailers

    def verify(
        self, keys: Sequence[Key], pages: Pages, part: int | None = None
    ) -> NDArray[np.bool_]:
        """Returns a mask of the ``pages`` that hold the KV of their ``keys``, bool ``[pages]``.

        The trailer must be valid for this layout and name the key, and the page must match its
        checksum.

        Args:
            part: Number of the only part whose KV is checked; None for the whole page.
        """
        if not len(pages):
            return np.zeros(0, np.bool_)
        trailers = self.trailers[pages]
        good = valid(trailers, self.layout, self.digest)
        good &= trailers["key"] == np.array(keys, "V32")
        good[good] &= self._checksums(pages[good]) == trailers["checksum"][good]
        for number in range(len(self.parts)) if part is None else [part]:
            some = pages[good]
            good[good] &= self._part_sums(some, number) == self.sums[some, number]
        return good

    def _checksums(self, pages: Pages) -> NDArray[np.uint64]:
        """Returns the checksums of pages; of a page with parts, that of its parts' checksums."""
        of = self.sums if self.parts else self.memory[:, : self.layout.block_bytes]
        return _hashes(np.ascontiguousarray(of[page]) for page in pages.tolist())

    def _part_sums(self, pages: Pages, part: int) -> NDArray[np.uint64]:
        begin, end = self._bytes(part)
        return _hashes(self.memory[page, begin:end] for page in pages.tolist())

    def _bytes(self, part: int) -> tuple[int, int]:
        """Returns the offsets in a page at which the KV of a part begins and ends."""
        size = self.layout.block_bytes // self.layout.layers
        first, end = self.parts[part]
        return first * size, end * size


def stride_of(layout: Layout) -> int:
    """Returns the bytes of a slot: page, checksums of its parts and trailer, rounded up to
    :data:`ALIGNMENT`."""
    sums = 8 * len(parts_of(layout))
    return -(-(layout.block_bytes + sums + TRAILER.itemsize) // ALIGNMENT) * ALIGNMENT


def valid(trailers: NDArray[np.void], layout: Layout, digest: bytes) -> NDArray[np.bool_]:
    """Returns a mask of the ``trailers`` that are intact and of this layout, bool ``[trailers]``.

    It does not check the pages that the trailers describe.
    """
    good: NDArray[np.bool_] = (
        (trailers["magic"] == _MAGIC)
        & (trailers["version"] == VERSION)
        & (trailers["page_bytes"] == layout.block_bytes)
        & (trailers["layout"] == np.void(digest))
        & (trailers["sequence"] < _LAST)
        & (trailers["seal"] == seals(trailers))
    )
    return good


def seals(trailers: NDArray[np.void]) -> NDArray[np.uint64]:
    """Returns the checksum of each trailer's fields before ``seal``, uint64 ``[trailers]``."""
    rows = np.ascontiguousarray(trailers).view(np.uint8).reshape(len(trailers), -1)
    return _hashes(row[:_SEALED] for row in rows)


def _hashes(buffers: Iterable[NDArray[Any]]) -> NDArray[np.uint64]:
    # xxhash takes one buffer per call. It runs at about 40 GB/s and releases the GIL.
    return np.fromiter((xxhash.xxh3_64_intdigest(each.data) for each in buffers), np.uint64)
