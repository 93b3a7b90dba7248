"""The KV pool as one block-major slab, whose tail another process can use (SwiftCache §3.4).

``[blocks, page, layers, 2, kv_heads, head_dim]``: a block holds every layer of its tokens, so a run
of blocks is one 1-D copy, one layer of it one 2-D copy, and the tail can be given away without
moving anything. Behind the blocks in this process's own memory there may be addresses for blocks
in the memory of others (:mod:`.lent`): to whoever reads and writes KV all are one array.
"""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sgl_ext.errors import ExtError
from sgl_ext.memory.lent import unique_name
from sgl_ext.memory.mapping import HUGE_PAGE, Mapping, create

if TYPE_CHECKING:
    import torch

_LONGEST_FINGERPRINT = 1024

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Element types a slab can hold, by torch's name, with their bytes."""


class SlabError(ExtError):
    """A slab cannot be made: what was asked, what was found, what to do."""


class Layout(msgspec.Struct, frozen=True):
    """Shape and meaning of a slab's bytes; two equal layouts can exchange blocks."""

    page: int
    """Tokens of a block."""
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Name of the torch dtype, one of :data:`DTYPES`."""
    fingerprint: str
    """Identifies model, weights and tensor-parallel rank: whose KV this is."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.page * self.token_bytes


@dataclass(frozen=True)
class Slab:
    """A mapped slab."""

    layout: Layout
    own: int
    """Blocks in this process's memory: the first ones."""
    blocks: int
    """Blocks that have an address."""
    mapping: Mapping
    fd: int
    """The memfd of the own blocks; closed with this object."""
    name: str
    """Of the memfd."""

    @classmethod
    def create(cls, layout: Layout, own: int, *, beyond: int = 0) -> Slab:
        """Allocates a zeroed slab.

        Args:
            own: blocks to allocate.
            beyond: blocks to have addresses for, behind them, where nothing is yet.

        Raises:
            SlabError: the geometry is none, the dtype is unknown or the machine is too small.
        """
        _check(layout, own, beyond)
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
        slab = cls(layout, own, own + beyond, mapping, fd, name)
        weakref.finalize(slab, os.close, fd).atexit = False
        return slab

    @property
    def address(self) -> int:
        """Address of block 0 in this process, a multiple of the huge page size."""
        return self.mapping.address

    @property
    def size(self) -> int:
        """Bytes of the own blocks."""
        return self.own * self.layout.block_bytes

    @property
    def reach(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.layout.block_bytes

    def tensor(self) -> torch.Tensor:
        """``[blocks, page, layers, 2, kv_heads, head_dim]`` over the slab's memory, no copy.

        Reading or writing a block that has an address but no memory ends this process.
        """
        import torch

        layout = self.layout
        flat = torch.from_numpy(np.asarray(self.mapping))
        return flat.view(getattr(torch, layout.dtype)).view(
            self.blocks, layout.page, layout.layers, 2, layout.kv_heads, layout.head_dim
        )

    def back_with_huge_pages(self, start: int, end: int) -> int:
        """Gives own blocks ``[start, end)`` physical memory in huge pages, if the kernel does.

        Returns:
            0, or an errno, as :meth:`Mapping.collapse`.
        """
        if not 0 <= start <= end <= self.own:
            raise SlabError(f"blocks {start} to {end} of {self.own} cannot be backed")
        # Whole huge pages only, and a page that two calls share belongs to the first.
        first, last = (
            -(-block * self.layout.block_bytes // HUGE_PAGE) * HUGE_PAGE for block in (start, end)
        )
        last = min(last, self.size // HUGE_PAGE * HUGE_PAGE)
        return self.mapping.collapse(first, last) if first < last else 0


def _check(layout: Layout, own: int, beyond: int) -> None:
    if layout.dtype not in DTYPES:
        raise SlabError(f"a slab holds {', '.join(DTYPES)}, not {layout.dtype}")
    counts = {"blocks": own} | {
        name: getattr(layout, name) for name in ("page", "layers", "kv_heads", "head_dim")
    }
    good = {name: type(count) is int and count >= 1 for name, count in counts.items()}
    if wrong := [f"{name} {counts[name]}" for name in counts if not good[name]]:
        raise SlabError(f"a slab needs at least one of each dimension, found {', '.join(wrong)}")
    if type(beyond) is not int or beyond < 0:
        raise SlabError(f"a slab has 0 or more blocks beyond its own, not {beyond}")
    if not layout.fingerprint.isascii() or len(layout.fingerprint) > _LONGEST_FINGERPRINT:
        raise SlabError(
            f"a fingerprint is ASCII of at most {_LONGEST_FINGERPRINT} characters, found "
            f"{layout.fingerprint[:20]!r}"
        )
