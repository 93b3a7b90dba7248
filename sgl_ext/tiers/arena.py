"""Host memory for pages of KV, each behind it a trailer that says whose page it is.

A page leaves this process (to a file, to another machine) together with its trailer, and what
comes back counts only if the trailer names the page that was asked for, in this layout, with the
checksum of these bytes. So an interrupted write, a foreign file or a reused place on a disk is a
miss, whatever else happened.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.mapping import HUGE_PAGE, Mapping, create
from sgl_ext.memory.slab import Layout

VERSION = 1
"""Of the trailer and of everything that is stored behind it."""
ALIGNMENT = 4096
"""What O_DIRECT asks of addresses, offsets and lengths on every disk in use."""

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
"""The end of a page's place; ``checksum`` is of the page, ``seal`` of the trailer before it."""
_LAST = 1 << 62
"""Sequence numbers end before it, so that there always is a next one."""
_SEALED = TRAILER.fields["seal"][1]  # type: ignore[index]

_LOWER = "tiers.host.capacity (without a host tier tiers.staging), or --max-total-tokens"
"""The remedy for an arena that is larger than the memory."""

Key = bytes
"""SHA-256 of a page's tokens and all before them, in their namespace (as SGLang chains them)."""
Pages = NDArray[np.int64]
"""Places in an arena."""


def layout_digest(layout: Layout) -> bytes:
    """16 bytes that identify whose KV, in which layout and trailer version, a page holds."""
    return hashlib.sha256(VERSION.to_bytes(4, "little") + msgspec.json.encode(layout)).digest()[:16]


class Arena:
    """``pages`` places of ``stride`` bytes each: a page in the layout of the slab, its trailer.

    Attributes:
        layout: of a page: one block of the slab.
        digest: see :func:`layout_digest`.
        stride: bytes of a place, a multiple of :data:`ALIGNMENT`.
        memory: uint8 ``[pages, stride]``.
    """

    def __init__(self, layout: Layout, pages: int) -> None:
        """Takes the memory, in huge pages where the kernel gives them, all of it at once.

        Raises:
            ExtError: fewer pages than one, or more than the machine has memory for.
        """
        self.stride = stride_of(layout)
        if pages < 1:
            raise ExtError(
                f"an arena needs room for one page of {self.stride:,} B (model, dtype and page "
                "size decide); raise its capacity"
            )
        self.layout = layout
        self.digest = layout_digest(layout)
        self.pages = pages
        self._sealing = threading.Lock()
        size = pages * self.stride
        fd = create("sgl_ext-arena", size, _LOWER)
        try:
            self._mapping = Mapping(fd, size, writable=True)
        finally:
            os.close(fd)
        self.memory = np.asarray(self._mapping).reshape(pages, self.stride)
        self.trailers = np.ndarray(
            (pages,), TRAILER, self.memory, self.stride - TRAILER.itemsize, (self.stride,)
        )

    @property
    def address(self) -> int:
        """Of place 0."""
        return self._mapping.address

    @property
    def size(self) -> int:
        """Bytes of all places."""
        return self.memory.size

    def back(self) -> int:
        """Gives the arena its physical memory, in huge pages; an errno where there are none."""
        whole = self.size // HUGE_PAGE * HUGE_PAGE
        return self._mapping.collapse(0, whole) if whole else 0

    def seal(self, keys: Sequence[Key], pages: Pages, sequence: int) -> None:
        """Writes the trailers of ``pages``, which hold the KV of ``keys``, numbered in order.

        A page whose trailer says so already is not summed again. Thread-safe; but what writes a
        page to a device meanwhile may catch half of a new number, and a trailer that is void.
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
            trailers["checksum"][~whole] = self._checksums(pages[~whole])
            trailers["seal"] = seals(trailers)
            self.trailers[pages] = trailers

    def verify(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Which ``pages`` hold the KV of their ``keys``, whole and of this layout."""
        if not len(pages):
            return np.zeros(0, np.bool_)
        trailers = self.trailers[pages]
        good = valid(trailers, self.layout, self.digest)
        good &= trailers["key"] == np.array(keys, "V32")
        good[good] &= self._checksums(pages[good]) == trailers["checksum"][good]
        return good

    def _checksums(self, pages: Pages) -> NDArray[np.uint64]:
        size = self.layout.block_bytes
        # At some 40 GB/s without the GIL; xxhash takes one buffer a call.
        digests = (
            xxhash.xxh3_64_intdigest(self.memory[page, :size].data) for page in pages.tolist()
        )
        return np.fromiter(digests, np.uint64, len(pages))


def stride_of(layout: Layout) -> int:
    """Bytes of a page's place: page and trailer, rounded up to :data:`ALIGNMENT`."""
    return -(-(layout.block_bytes + TRAILER.itemsize) // ALIGNMENT) * ALIGNMENT


def valid(trailers: NDArray[np.void], layout: Layout, digest: bytes) -> NDArray[np.bool_]:
    """Which trailers are whole and of this layout; says nothing of the pages before them."""
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
    """Checksums of the trailers themselves."""
    rows = np.ascontiguousarray(trailers).view(np.uint8).reshape(len(trailers), -1)
    digests = (xxhash.xxh3_64_intdigest(row[:_SEALED].data) for row in rows)
    return np.fromiter(digests, np.uint64, len(trailers))
