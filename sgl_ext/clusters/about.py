"""Description of a stored context."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from sgl_ext.clusters.arrays import Shapes
from sgl_ext.clusters.codes import CENTROIDS
from sgl_ext.clusters.files import MOST_COPIES
from sgl_ext.clusters.geometry import Count, Geometry, Salt
from sgl_ext.clusters.placement import Blocks

MOST_EXTENTS = 8
"""Maximum number of extents of a context, each with one file on each device."""

_REFITTED = 1.2
"""Number of entries, relative to those that codes were fitted to, from which they are fitted again.
Keys at other positions differ, so that their codes are less exact."""

_Near = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class About(msgspec.Struct, frozen=True):
    """Description of a context in its index."""

    geometry: Geometry
    tokens: Count
    sinks: _Near
    window: _Near
    devices: Count
    subspaces: Count
    """Bytes of the code of a key, for each KV head."""
    fitted: Count
    """Number of the first entries whose keys the centroids of the codes were fitted to."""
    salt: Salt | None = None
    """``cache_salt`` of the tenant; other tenants cannot follow, see or delete the context."""
    copies: Annotated[int, msgspec.Meta(ge=1, le=MOST_COPIES)] = 1
    """Copies of each block, on different devices."""
    later: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_EXTENTS - 1)] = ()
    """Entries before each extent but the first."""
    block: _Near = 0
    """Entries of a block; 0 for as many as 4 KiB hold, one at least."""

    def __post_init__(self) -> None:
        blocks = self.blocks
        bounds = (0, *self.later, blocks.entries)
        if any(first >= end or first % blocks.block for first, end in pairwise(bounds)):
            raise ValueError(
                f"its extents do not have one block of {blocks.block} entries at least"
            )
        if blocks.entries < 1 or blocks.entries % blocks.block:
            raise ValueError(
                f"{blocks.entries} entries outside sinks and window are not a positive multiple "
                f"of the block size {blocks.block}"
            )
        if self.fitted > blocks.entries:
            raise ValueError(
                f"its codes are fitted to {self.fitted} entries, but it has {blocks.entries}"
            )
        if self.copies > self.devices:
            raise ValueError(f"{self.copies} copies do not fit on {self.devices} devices")
        if self.geometry.head_dim % self.subspaces:
            raise ValueError(
                f"head_dim {self.geometry.head_dim} is not a multiple of {self.subspaces} subspaces"
            )

    @property
    def blocks(self) -> Blocks:
        """Placement of the entries on the devices."""
        middle = self.tokens - self.sinks - self.window
        geometry = self.geometry
        return Blocks(
            middle, geometry.entry_bytes, self.devices, geometry.layers, self.copies, self.later,
            self.block,
        )  # fmt: skip

    def continued(self, tokens: int, window: int) -> About:
        """Returns the description of a context that begins with this one.

        If it has more blocks, its last extent is new. A new extent that would be one too many
        (:data:`MOST_EXTENTS`) replaces all but the first. Codes are fitted again only when there
        are many new entries, because all keys are encoded then.

        Args:
            tokens: Number of tokens of that context.
            window: Number of its last tokens that stay in memory, less than a block more, or all
                behind the blocks of this one.
        """
        blocks, later = self.blocks, self.later
        middle = (tokens - self.sinks - window) // blocks.block * blocks.block
        if middle <= blocks.entries:
            middle = blocks.entries
        elif blocks.extents < MOST_EXTENTS:
            later = (*later, blocks.entries)
        else:
            later = later[:1]
        fitted = middle if middle >= _REFITTED * self.fitted else self.fitted
        return msgspec.structs.replace(
            self, tokens=tokens, window=tokens - self.sinks - middle, fitted=fitted, later=later
        )

    @property
    def index_bytes(self) -> int:
        """Bytes of the arrays of the index, without its header."""
        return sum(
            math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in self.shapes().values()
        )

    def shapes(self) -> Shapes:
        """Returns dtypes and shapes of the arrays: the tokens, and those of all layers."""
        geometry, blocks = self.geometry, self.blocks
        layers, heads, width = geometry.layers, geometry.kv_heads, geometry.head_dim
        near = self.sinks + self.window
        return {
            "tokens": (np.int32, (self.tokens,)),
            "codes": (np.uint8, (layers, heads, blocks.entries, self.subspaces)),
            "centroids": (np.uint16, (layers, heads, width, CENTROIDS)),
            "projection": (np.float32, (layers, heads, width, width)),
            "mean": (np.float32, (layers, heads, width)),
            "order": (np.int32, (layers, blocks.entries)),
            "often": (np.int32, (layers, blocks.blocks)),
            "sums": (np.uint64, (layers, blocks.blocks)),
            "resident": (np.uint8, (layers, near, geometry.entry_bytes)),
        }
