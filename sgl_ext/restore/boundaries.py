"""What goes into the first layer of a pipeline stage, kept so that the stage can compute alone.

Beside the KV of a stage's layers, which it computes from them, these activations are small: one
row of the model's hidden size for each token (CacheFlow §3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.slab import Layout
from sgl_ext.tiers.arena import Arena, Key
from sgl_ext.tiers.tier import Tier


def boundary_layout(hidden: int, page: int, dtype: str, fingerprint: str) -> Layout:
    """Of a page of boundary activations: tiers hold it like a page of KV of one layer.

    Args:
        hidden: elements of a token's row.
        fingerprint: of the weights, and of the boundary.

    Raises:
        ValueError: ``hidden`` is odd.
    """
    if hidden % 2:
        raise ValueError(f"rows of {hidden} elements have no two halves")
    return Layout(page, 1, 1, hidden // 2, dtype, fingerprint)


class BoundaryStore:
    """Boundary activations in a tier, under the keys of the pages whose tokens they are of.

    Not thread-safe; its methods wait for the tier.

    Args:
        arena: of a :func:`boundary_layout`; all of its places are used for what is under way.
    """

    def __init__(self, tier: Tier, arena: Arena) -> None:
        self.row_bytes = arena.layout.token_bytes
        self._tier = tier
        self._arena = arena
        self._page = arena.layout.page

    def keep(self, keys: Sequence[Key], rows: NDArray[np.uint8]) -> int:
        """Stores whole pages.

        Args:
            rows: ``[tokens, row_bytes]``, of all tokens of ``keys``.

        Returns:
            Pages that can be found from now on.
        """
        pages = rows.reshape(len(keys), self._arena.layout.block_bytes)
        kept = 0
        for first in range(0, len(keys), self._arena.pages):
            some = keys[first : first + self._arena.pages]
            self._memory(len(some))[:] = pages[first : first + len(some)]
            kept += int(np.count_nonzero(self._tier.store(some, np.arange(len(some)))))
        return kept

    def load(self, keys: Sequence[Key]) -> NDArray[np.uint8]:
        """Rows of the first of ``keys``, as far as the tier has them: ``[tokens, row_bytes]``.

        At most as many pages as the arena has.
        """
        some = keys[: self._arena.pages]
        good = self._tier.load(some, np.arange(len(some)))
        count = len(some) if good.all() else int(np.argmin(good))
        return self._memory(count).copy().reshape(count * self._page, self.row_bytes)

    def _memory(self, pages: int) -> NDArray[np.uint8]:
        """Of the first places."""
        return self._arena.memory[:pages, : self._arena.layout.block_bytes]
