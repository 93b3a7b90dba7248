"""Which page lies in which slot of a file, and which slot the next one gets. Plain data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers.arena import Key

_PHASES = 1024

GROW_AGAIN_S = 60.0
"""After a file system was full, so long only slots that have their blocks are used."""


class Slots:
    """Slots ``0`` to ``limit - 1`` of one file, each empty, taken by a writer, or in the index.

    Attributes:
        limit: how many there may be.
        grown: how many have ever been handed out, and so may have a place in the file.
        index: the slot of each page, least recently used first.
        evictions: pages that had to make room for others.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.grown = 0
        self.index: OrderedDict[Key, int] = OrderedDict()
        self.evictions = 0
        self._free: list[int] = []
        self._unbacked: list[int] = []  # the file system had no blocks for them
        self._full_until = float("-inf")

    def restore(self, pages: Iterable[tuple[Key, int]], grown: int) -> None:
        """Takes over what a scan has found, least recently used first, each key once."""
        self.index = OrderedDict(pages)
        self.grown = grown
        free = np.ones(grown, bool)
        free[np.fromiter(self.index.values(), np.int64, len(self.index))] = False
        self._free = np.flatnonzero(free)[::-1].tolist()

    def full(self, now: float) -> bool:
        """Whether the file system was lately found full."""
        return now < self._full_until

    def room(self, now: float) -> int:
        """Slots that can be taken at ``now`` (monotonic seconds) without an eviction."""
        new = 0 if self.full(now) else len(self._unbacked) + self.limit - self.grown
        return len(self._free) + new

    def take(self, count: int, now: float) -> list[int]:
        """At most ``count`` slots, in order: free ones, new ones, then those of the oldest pages.

        Until they are published or released they belong to the caller.
        """
        taken = _pop(self._free, count)
        if not self.full(now):
            taken += _pop(self._unbacked, count - len(taken))
            grown = min(self.grown + count - len(taken), self.limit)
            taken += range(self.grown, grown)
            self.grown = grown
        victims = min(count - len(taken), len(self.index))
        taken += [self.index.popitem(last=False)[1] for _ in range(victims)]
        self.evictions += victims
        return sorted(taken)

    def publish(self, key: Key, slot: int) -> None:
        """``slot`` holds ``key``, which is in no other, and is the most recently used."""
        self.index[key] = slot

    def release(self, slots: Sequence[int]) -> None:
        """Slots that were taken hold nothing of use."""
        self._free += slots

    def release_unbacked(self, slots: Sequence[int], now: float) -> None:
        """As ``release``, because the file system was full: it may have no blocks for them."""
        self._unbacked += slots
        self._full_until = now + GROW_AGAIN_S

    def drop(self, key: Key, slot: int) -> bool:
        """Forgets ``key``; False if it is not, or no longer, in ``slot``."""
        if self.index.get(key) != slot:
            return False
        self._free.append(self.index.pop(key))
        return True

    def abandon(self) -> None:
        """Forgets everything, and nothing can be taken any more."""
        self.index.clear()
        self._free.clear()
        self._unbacked.clear()
        self.limit = self.grown = 0


def spread(
    count: int, room: Sequence[int], used: Sequence[int], *, phase: float
) -> NDArray[np.int64]:
    """Which volume gets each of ``count`` pages; of fewer, if they do not have that many slots.

    In proportion to their ``room``, then, by eviction, to what they have ``used``, and each
    spread over the whole, so that any part of the pages can be read from all. What does not come
    out even depends on ``phase`` in [0, 1): evenly spread phases make up for it.
    """
    new = min(count, sum(room))
    old = min(count - new, sum(used))
    shares = np.add(_apportion(new, room, phase), _apportion(old, used, phase))
    owners: NDArray[np.int64] = np.repeat(np.arange(len(shares), dtype=np.int64), shares)
    position = np.arange(len(owners)) - np.repeat(np.cumsum(shares) - shares, shares)
    return owners[np.argsort((position + 0.5) / shares[owners], kind="stable")]


def _apportion(count: int, weights: Sequence[int], phase: float) -> NDArray[np.int64]:
    """Parts of ``count``, at most the sum of ``weights``, none more than its weight."""
    # Whole numbers: a phase just below 1 would round a sum in floating point up.
    steps, total = int(phase * _PHASES), max(sum(weights), 1)
    ends = (count * _PHASES * np.cumsum(weights, dtype=np.int64) + steps * total) // (
        total * _PHASES
    )
    return np.diff(ends, prepend=0)


def _pop(stack: list[int], count: int) -> list[int]:
    at = max(len(stack) - count, 0)
    popped = stack[at:]
    del stack[at:]
    return popped
