"""The KV pool as one block-major slab whose tail another process can use (SwiftCache §3.4).

The shape is ``[blocks, page, layers, 2, kv_heads, head_dim]``. A block holds every layer of its
tokens, so a run of blocks is one 1-D copy and one layer of a run is one 2-D copy. The tail can be
lent without moving any data. After the blocks in this process's own memory there may be addresses
for blocks in the memory of other processes (:mod:`.lent`). Code that reads and writes KV sees all
of them as one array.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sgl_ext.errors import ExtError
from sgl_ext.memory.lent import unique_name
from sgl_ext.memory.mapping import HUGE_PAGE, PAGE, Mapping, create

if TYPE_CHECKING:
    import torch

_LONGEST_FINGERPRINT = 1024

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per element of each dtype that a slab can hold, by the name of the torch dtype"""


class SlabError(ExtError):
    """Error raised when a slab cannot be created or backed.

    The message says what was asked and what was found.
    """


class Layout(msgspec.Struct, frozen=True):
    """Shape and meaning of a slab's bytes; slabs with equal layouts can exchange blocks."""

    page: int
    """Tokens per block"""
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Name of the torch dtype, one of :data:`DTYPES`"""
    fingerprint: str
    """Identifier of the model, weights and tensor-parallel rank that the KV belongs to"""

    @property
    def token_bytes(self) -> int:
        """Bytes of the K and V of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.page * self.token_bytes


@dataclass(frozen=True)
class Slab(ABC):
    """Memory of all blocks of a KV pool."""

    layout: Layout
    own: int
    """Number of blocks in this process's own memory, which come first"""
    blocks: int
    """Number of blocks that have an address"""
    device: int | None
    """Number of the CUDA device that has the memory; None for host memory"""

    @property
    @abstractmethod
    def address(self) -> int:
        """Address of block 0 in this process."""

    @property
    def gpu(self) -> str:
        """UUID of the device that has the memory; empty for host memory."""
        return ""

    @property
    def size(self) -> int:
        """Bytes of the own blocks."""
        return self.own * self.layout.block_bytes

    @property
    def reach(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.layout.block_bytes

    def tensor(self) -> torch.Tensor:
        """Returns a view ``[blocks, page, layers, 2, kv_heads, head_dim]`` of the slab's memory.

        The dtype is the layout's. Reading or writing a block that has an address but no memory
        crashes this process.
        """
        import torch

        layout = self.layout
        flat = self._bytes()[: self.reach]
        return flat.view(getattr(torch, layout.dtype)).view(
            self.blocks, layout.page, layout.layers, 2, layout.kv_heads, layout.head_dim
        )

    @abstractmethod
    def _bytes(self) -> torch.Tensor:
        """Returns the memory as ``uint8``, at least :attr:`reach` bytes."""


@dataclass(frozen=True)
class HostSlab(Slab):
    """A mapped slab in host memory."""

    mapping: Mapping
    """Mapping of all blocks"""
    fd: int
    """File descriptor of the memfd of the own blocks; closed with this object"""
    name: str
    """Name of the memfd"""

    @classmethod
    def create(cls, layout: Layout, own: int, *, beyond: int = 0) -> HostSlab:
        """Allocates a zeroed slab.

        Args:
            own: number of blocks to allocate.
            beyond: number of blocks after these that get addresses but no memory yet.

        Raises:
            SlabError: a dimension or the fingerprint is invalid, the dtype is unknown, or the
                machine has too little memory.
        """
        check(layout, own, beyond)
        size, reach = own * layout.block_bytes, (own + beyond) * layout.block_bytes
        with ExitStack() as undo:
            try:
                fd = create(name := unique_name("sgl_ext-kv"), size)
                undo.callback(os.close, fd)
                mapping = Mapping(fd, size, writable=True, reach=reach)
            except (OSError, ExtError) as error:
                raise SlabError(
                    f"cannot allocate a slab of {own} blocks of {layout.block_bytes:,} B: {error}"
                ) from None
            undo.pop_all()
        slab = cls(layout, own, own + beyond, None, mapping, fd, name)
        weakref.finalize(slab, os.close, fd).atexit = False
        return slab

    @property
    def address(self) -> int:
        """Address of block 0 in this process, a multiple of the huge page size."""
        return self.mapping.address

    @property
    def memory_page(self) -> int:
        """Bytes of a unit of memory, which other processes can map only as a whole."""
        return PAGE

    def _bytes(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.asarray(self.mapping))

    def back_with_huge_pages(self, start: int, end: int) -> int:
        """Backs own blocks ``[start, end)`` with huge pages, if the kernel allows it.

        Only whole huge pages within the own blocks are backed.

        Returns:
            0 or an errno; see :meth:`Mapping.collapse`.

        Raises:
            SlabError: the range contains blocks that are not own blocks.
        """
        if not 0 <= start <= end <= self.own:
            raise SlabError(f"cannot back blocks {start} to {end} of {self.own}")
        # A huge page that two consecutive ranges share is backed with the first range.
        first, last = (
            -(-block * self.layout.block_bytes // HUGE_PAGE) * HUGE_PAGE for block in (start, end)
        )
        last = min(last, self.size // HUGE_PAGE * HUGE_PAGE)
        return self.mapping.collapse(first, last) if first < last else 0


def check(layout: Layout, own: int, beyond: int) -> None:
    """Raises SlabError unless a slab can have this layout and these numbers of blocks."""
    if layout.dtype not in DTYPES:
        raise SlabError(f"a slab supports {', '.join(DTYPES)}, found {layout.dtype}")
    counts = {"blocks": own} | {
        name: getattr(layout, name) for name in ("page", "layers", "kv_heads", "head_dim")
    }
    good = {name: type(count) is int and count >= 1 for name, count in counts.items()}
    if wrong := [f"{name} {counts[name]}" for name in counts if not good[name]]:
        raise SlabError(f"a slab needs at least one of each dimension, found {', '.join(wrong)}")
    if type(beyond) is not int or beyond < 0:
        raise SlabError(f"a slab requires 0 or more blocks beyond its own, found {beyond}")
    if not layout.fingerprint.isascii() or len(layout.fingerprint) > _LONGEST_FINGERPRINT:
        raise SlabError(
            f"a fingerprint must be ASCII of at most {_LONGEST_FINGERPRINT} characters, found "
            f"{layout.fingerprint[:20]!r}"
        )
