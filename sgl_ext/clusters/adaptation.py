"""Adaptation of the blocks in memory to new queries (Swarm §6.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters


class HotBlocks:
    """Blocks of a layer that are kept in memory: those that were activated most often recently.

    All blocks have the same size, so by Eq. 6 their frequency alone determines which are worth
    keeping. Each step multiplies all frequencies by ``decay`` and adds one to those of the blocks
    that it activates, because the activated blocks change in the course of a text.

    Args:
        frequency: Activations of each block in the profile, ``[blocks]``, in any unit.
        capacity: Number of blocks in memory.
        decay: Factor of all frequencies in each step.
    """

    def __init__(self, frequency: NDArray[np.int64], capacity: int, *, decay: float = 0.8) -> None:
        # The most frequent block of the profile counts as if one step had activated it.
        self._frequency = frequency / max(frequency.max(initial=0), 1)
        self._decay = decay
        self._capacity = min(capacity, len(frequency))
        best = np.argsort(-frequency, kind="stable")[: self._capacity]
        self.place = np.full(len(frequency), -1, np.int64)
        """Place in memory of each block, int64 ``[blocks]``; -1 if the block is not in memory."""
        self.place[best] = np.arange(self._capacity)
        self._held = best.astype(np.int64)

    @property
    def held(self) -> NDArray[np.int64]:
        """Block in each place, int64 ``[capacity]``."""
        return self._held

    def step(
        self, activated: NDArray[np.int64], there: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Counts the blocks that a step activated, and replaces blocks in memory by better ones.

        Args:
            activated: Blocks that the step activated, without duplicates.
            there: Those of ``activated`` that may enter memory; all if None.

        Returns:
            Blocks that have entered memory, ``[blocks]``. The caller fills their places.
        """
        if not self._capacity:
            return np.empty(0, np.int64)
        there = activated if there is None else there
        return _clusters.step(
            self._frequency, self.place, self._held, self._decay, activated, there
        )
