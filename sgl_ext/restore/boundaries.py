"""What goes into the first layer of a pipeline stage, kept so that the stage can compute alone.

Beside the KV of a stage's layers, which it computes from them, these activations are small: one
row of the model's hidden size for each token (CacheFlow §3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_ext.memory.slab import DTYPES, Layout
from sgl_ext.tiers.arena import Arena, Key, Pages
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
        layout = arena.layout
        self.row = 2 * layout.head_dim
        """Elements of a token's row."""
        self._tier = tier
        self._arena = arena
        self._page = layout.page
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._page_bytes = layout.page * self.row * DTYPES[layout.dtype]

    def keep(self, keys: Sequence[Key], activations: torch.Tensor) -> int:
        """Stores whole pages.

        Args:
            activations: ``[tokens, hidden]``, of all tokens of ``keys``.

        Returns:
            Pages that can be found from now on.
        """
        rows = activations.to(self._dtype).contiguous().view(torch.uint8)
        pages = rows.reshape(len(keys), self._page_bytes).numpy()
        kept = 0
        for first in range(0, len(keys), self._arena.pages):
            some = keys[first : first + self._arena.pages]
            places = np.arange(len(some))
            self._arena.memory[places, : self._page_bytes] = pages[first : first + len(some)]
            kept += int(np.count_nonzero(self._tier.store(some, places)))
        return kept

    def load(self, keys: Sequence[Key]) -> torch.Tensor:
        """Activations of the first of ``keys``, as far as the tier has them: ``[tokens, hidden]``.

        At most as many pages as the arena has.
        """
        some = keys[: self._arena.pages]
        places: Pages = np.arange(len(some))
        good = self._tier.load(some, places)
        count = len(some) if good.all() else int(np.argmin(good))
        rows = torch.empty(count * self._page, self.row, dtype=self._dtype)
        pages = rows.view(torch.uint8).reshape(count, self._page_bytes).numpy()
        pages[:] = self._arena.memory[:count, : self._page_bytes]
        return rows
