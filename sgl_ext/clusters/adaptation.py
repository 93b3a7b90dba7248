"""How clusters and what is kept of them in memory follow what is asked (Swarm §6.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters


def joined(
    active: NDArray[np.bool_], medoids: NDArray[np.bool_], radius: float
) -> list[NDArray[np.int64]]:
    """The clusters that each new entry joins when it leaves the local window (Eq. 9).

    Args:
        active: ``[steps, new]``: which of the new entries each step of the window activated.
        medoids: ``[steps, clusters]``: which clusters' medoids.
        radius: that an entry and the medoid of its cluster are apart, at most.

    Returns:
        Of each new entry its clusters, nearest first; none if it is near to none.
    """
    distance = distances(active, medoids)
    order = np.argsort(distance, axis=1, kind="stable")
    near = np.take_along_axis(distance, order, axis=1) < radius
    return [row[: int(count)] for row, count in zip(order, near.sum(axis=1), strict=True)]


def distances(active: NDArray[np.bool_], medoids: NDArray[np.bool_]) -> NDArray[np.float32]:
    """``[new, clusters]``: Jaccard's, of the steps that activated either; see :func:`joined`."""
    new, old = active.astype(np.float32), medoids.astype(np.float32)
    shared = new.T @ old
    either = new.sum(axis=0)[:, None] + old.sum(axis=0)[None, :] - shared
    found = np.where(either > 0, 1 - shared / np.maximum(either, 1), np.float32(1))
    return found.astype(np.float32)


class HotBlocks:
    """Which blocks of a layer are kept in memory: those that have been activated most often lately.

    Blocks are equally large, so that by Eq. 6 their frequency alone says which of them are worth
    it. Every step adds one to the frequency of what it activates and takes a part of all: a text
    stays with what it is about for some tokens, and then no longer asks for it.

    Args:
        frequency: ``[blocks]``, of the profile, in any unit.
        capacity: blocks in memory.
        decay: what a step leaves of a frequency.
    """

    def __init__(self, frequency: NDArray[np.int64], capacity: int, *, decay: float = 0.8) -> None:
        # All that the profile has seen is worth one step.
        self._frequency = frequency / max(frequency.max(initial=0), 1)
        self._decay = decay
        self._capacity = min(capacity, len(frequency))
        best = np.argsort(-frequency, kind="stable")[: self._capacity]
        self.place = np.full(len(frequency), -1, np.int64)
        """Of each block in memory; -1 where it is not."""
        self.place[best] = np.arange(self._capacity)
        self._held = best.astype(np.int64)

    @property
    def held(self) -> NDArray[np.int64]:
        """``[capacity]`` the block in each place."""
        return self._held

    def step(
        self, activated: NDArray[np.int64], there: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """A step has activated some blocks, none of them twice.

        Args:
            there: of these the ones that can come into memory; all of them if not given.

        Returns:
            ``[blocks]`` of those that have come into memory, whose places are to be filled.
        """
        if not self._capacity:
            return np.empty(0, np.int64)
        there = activated if there is None else there
        return _clusters.step(
            self._frequency, self.place, self._held, self._decay, activated, there
        )
