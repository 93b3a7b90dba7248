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
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.mapping import HUGE_PAGE, Mapping, create
from sgl_ext.memory.slab import Layout

VERSION = 1
"""Version of the trailer and of the format of the stored pages."""
ALIGNMENT = 4096
"""Alignment of addresses, offsets and lengths for O_DIRECT, in bytes."""

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
"""Last bytes of a slot: ``checksum`` covers the page, ``seal`` the trailer's fields before it."""
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

    A slot holds a page in the layout of the slab, padding, and the page's trailer at its end.

    Attributes:
        layout: Layout of a page, which is one block of the slab.
        digest: Result of :func:`layout_digest` for ``layout``.
        pages: Number of slots.
        stride: Bytes of a slot, a multiple of :data:`ALIGNMENT`.
        memory: All slots, uint8 ``[pages, stride]``.
        trailers: Trailers of all slots, a view of ``memory``, :data:`TRAILER` ``[pages]``.
    """

    def __init__(self, layout: Layout, pages: int) -> None:
        """Maps the memory of all slots, and asks the kernel for huge pages.

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
        """Address of slot 0 in this process."""
        return self._mapping.address

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return self.memory.size

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
            trailers["checksum"][~whole] = self._checksums(pages[~whole])
            trailers["seal"] = seals(trailers)
            self.trailers[pages] = trailers

    def verify(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Returns a mask of the ``pages`` that hold the KV of their ``keys``, bool ``[pages]``.

        The trailer must be valid for this layout and name the key, and the page must match its
        checksum.
        """
        if not len(pages):
            return np.zeros(0, np.bool_)
        trailers = self.trailers[pages]
        good = valid(trailers, self.layout, self.digest)
        good &= trailers["key"] == np.array(keys, "V32")
        good[good] &= self._checksums(pages[good]) == trailers["checksum"][good]
        return good

    def _checksums(self, pages: Pages) -> NDArray[np.uint64]:
        size = self.layout.block_bytes
        # xxhash takes one buffer per call. It runs at about 40 GB/s and releases the GIL.
        digests = (
            xxhash.xxh3_64_intdigest(self.memory[page, :size].data) for page in pages.tolist()
        )
        return np.fromiter(digests, np.uint64, len(pages))


def stride_of(layout: Layout) -> int:
    """Returns the bytes of a slot: page and trailer, rounded up to :data:`ALIGNMENT`."""
    return -(-(layout.block_bytes + TRAILER.itemsize) // ALIGNMENT) * ALIGNMENT


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
    digests = (xxhash.xxh3_64_intdigest(row[:_SEALED].data) for row in rows)
    return np.fromiter(digests, np.uint64, len(trailers))
