"""Pages in which one layer follows another, so that a lower tier can load some layers alone."""

from __future__ import annotations

from functools import cached_property

import msgspec

from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout

ALIGNMENT = 4096
"""Alignment of addresses, offsets and lengths for O_DIRECT, in bytes."""
_PART_BYTES = 16 << 10
"""Minimum size of a part, in bytes. SSDs read smaller pieces at a lower rate; of larger ones a
forward takes back more layers than it need."""


class LayerMajor(Layout, frozen=True, dict=True):
    """Layout ``[layers, page, 2, kv_heads, head_dim]`` of a page beyond the device.

    A page is divided into parts of whole layers. Each part begins at a multiple of
    :data:`ALIGNMENT`, and has a checksum of its own.
    """

    part: int
    """Layers of a part; the last part may have fewer."""

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Layers ``(first, end)`` of each part."""
        step = self.part
        return tuple((at, min(at + step, self.layers)) for at in range(0, self.layers, step))


def layer_major(layout: Layout) -> LayerMajor:
    """Returns the layer-major layout of pages of the same KV.

    Raises:
        ExtError: pages are so small that they have fewer than two parts.
    """
    size = layout.block_bytes // layout.layers
    for part in range(1, layout.layers):
        if part * size >= _PART_BYTES and part * size % ALIGNMENT == 0:
            return LayerMajor(**msgspec.structs.asdict(layout), part=part)
    raise ExtError(
        f"tiers.layout is layer_major, but the {layout.layers} layers of a page of {layout.page} "
        f"tokens have {size:,} B each, so that no two parts of {_PART_BYTES:,} B or more end at a "
        f"multiple of {ALIGNMENT} B; raise --page-size, or remove tiers.layout"
    )


def parts_of(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Returns the layers ``(first, end)`` of each part of a page; none if it is loaded whole."""
    return layout.parts if isinstance(layout, LayerMajor) else ()
