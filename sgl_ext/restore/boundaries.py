"""Boundary activations: inputs of a stage's first layer, stored so that the stage computes alone.

A pipeline stage computes the KV of its layers from them. They are small compared with this KV: one
row of the model's hidden size per token (CacheFlow §3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.slab import Layout
from sgl_ext.tiers.arena import Arena, Key
from sgl_ext.tiers.tier import Tier


def boundary_layout(hidden: int, page: int, dtype: str, fingerprint: str) -> Layout:
    """Returns the layout of a page of boundary activations.

    Tiers store such a page as a page of KV of one layer.

    Args:
        hidden: elements of a token's row.
        page: tokens of a page.
        dtype: name of the torch dtype.
        fingerprint: identifies the weights and the boundary.

    Raises:
        ValueError: ``hidden`` is odd.
    """
    if hidden % 2:
        raise ValueError(f"rows must have an even number of elements, found {hidden}")
    return Layout(page, 1, 1, hidden // 2, dtype, fingerprint)


class BoundaryStore:
    """Store of boundary activations in a tier, under the keys of the pages of their tokens.

    Not thread-safe. Its methods wait for the tier.

    Args:
        arena: arena of a :func:`boundary_layout`; the store uses all of its places for transfers.
    """

    def __init__(self, tier: Tier, arena: Arena) -> None:
        self.row_bytes = arena.layout.token_bytes
        self._tier = tier
        self._arena = arena
        self._page = arena.layout.page

    def keep(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> int:
        """Stores whole pages.

        Args:
            rows: ``[tokens, row_bytes]``, one row for each token of ``keys``.

        Returns:
            Number of pages that the tier has stored.
        """
        pages = rows.reshape(len(keys), self._arena.layout.block_bytes)
        kept = 0
        for first in range(0, len(keys), self._arena.pages):
            some = keys[first : first + self._arena.pages]
            self._memory(len(some))[:] = pages[first : first + len(some)]
            kept += int(np.count_nonzero(self._tier.store(some, np.arange(len(some)))))
        return kept

    def load(self, keys: Sequence[Key]) -> NDArray[np.uint8]:
        """Loads the rows of the leading ``keys`` that the tier has: ``[tokens, row_bytes]``.

        Loads at most as many pages as the arena has.
        """
        some = keys[: self._arena.pages]
        good = self._tier.load(some, np.arange(len(some)))
        count = len(some) if good.all() else int(np.argmin(good))
        return self._memory(count).copy().reshape(count * self._page, self.row_bytes)

    def _memory(self, pages: int) -> NDArray[np.uint8]:
        """Returns the memory of the first places, ``[pages, block_bytes]``."""
        return self._arena.memory[:pages, : self._arena.layout.block_bytes]
