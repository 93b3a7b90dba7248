"""Index and allocation of the slots of one file, as plain data without I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers.arena import Key

_PHASES = 1024

GROW_AGAIN_S = 60.0
"""Seconds after the file system was found full in which only slots with allocated blocks are
used."""


class Slots:
    """Slots ``0`` to ``limit - 1`` of one file: each is free, taken by a writer, or in the index.

    Attributes:
        limit: Largest number of slots.
        grown: Number of slots that were ever taken, and may therefore exist in the file.
        index: Slot of each page, least recently used first.
        evictions: Pages evicted so far.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.grown = 0
        self.index: OrderedDict[Key, int] = OrderedDict()
        self.evictions = 0
        self._free: list[int] = []
        self._unbacked: list[int] = []  # free, but the file system had no blocks for them
        self._doubtful: list[int] = []  # free, but could not be written
        self._full_until = float("-inf")

    def restore(self, pages: Iterable[tuple[Key, int]], grown: int) -> None:
        """Replaces the index with the pages that a scan has found.

        Args:
            pages: Key and slot of each page, least recently used first; each key once.
            grown: Slots that exist in the file.
        """
        self.index = OrderedDict(pages)
        self.grown = grown
        free = np.ones(grown, bool)
        free[np.fromiter(self.index.values(), np.int64, len(self.index))] = False
        self._free = np.flatnonzero(free)[::-1].tolist()

    def full(self, now: float) -> bool:
        """Returns whether the file system was found full in the last :data:`GROW_AGAIN_S`.

        Args:
            now: Monotonic seconds.
        """
        return now < self._full_until

    def room(self, now: float) -> int:
        """Returns how many slots can be taken at ``now`` (monotonic seconds) without evictions."""
        new = 0 if self.full(now) else len(self._unbacked) + self.limit - self.grown
        return len(self._free) + new

    @property
    def reused(self) -> int:
        """Number of slots that can be taken besides the :meth:`room`: they hold pages, which are
        evicted, or could not be written."""
        return len(self.index) + len(self._doubtful)

    def take(self, count: int, now: float) -> list[int]:
        """Takes up to ``count`` slots and returns them in ascending order.

        Free slots are taken first, then new ones, then those of the least recently used pages,
        which are evicted, and last those that could not be written. A slot belongs to the caller
        until it is published or released.
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
        taken += _pop(self._doubtful, count - len(taken))
        return sorted(taken)

    def publish(self, key: Key, slot: int) -> None:
        """Adds ``key`` to the index as the most recently used page; ``slot`` holds it.

        The key must not be in the index.
        """
        self.index[key] = slot

    def release(self, slots: Sequence[int]) -> None:
        """Frees slots that were taken."""
        self._free += slots

    def release_doubtful(self, slots: Sequence[int]) -> None:
        """Frees slots that could not be written.

        They are used last: a damaged slot would fail every batch that it is part of.
        """
        self._doubtful += slots

    def release_unbacked(self, slots: Sequence[int], now: float) -> None:
        """Frees slots that may have no blocks, because the file system was full at ``now``."""
        self._unbacked += slots
        self._full_until = now + GROW_AGAIN_S

    def drop(self, key: Key, slot: int) -> bool:
        """Removes ``key`` and frees its slot; returns False if the key is not in ``slot``."""
        if self.index.get(key) != slot:
            return False
        self._free.append(self.index.pop(key))
        return True

    def abandon(self) -> None:
        """Removes all pages and slots, so that no slot can be taken any more."""
        self.index.clear()
        self._free.clear()
        self._unbacked.clear()
        self._doubtful.clear()
        self.limit = self.grown = 0


def spread(
    count: int, room: Sequence[int], used: Sequence[int], *, phase: float
) -> NDArray[np.int64]:
    """Assigns ``count`` pages to volumes.

    Volumes get pages in proportion to their ``room`` first, then in proportion to the slots that
    they have ``used``, whose pages are evicted. The pages of each volume are interleaved with
    those of the others, so that any part of the pages can be read from all volumes.

    Args:
        room: Slots of each volume that need no eviction.
        used: Slots of each volume that hold a page.
        phase: Offset in [0, 1) that decides how shares are rounded. Evenly spread phases balance
            the rounding over many calls.

    Returns:
        The number of each page's volume, int64 ``[count]``, or shorter if the volumes have fewer
        slots.
    """
    new = min(count, sum(room))
    old = min(count - new, sum(used))
    shares = np.add(_apportion(new, room, phase), _apportion(old, used, phase))
    owners: NDArray[np.int64] = np.repeat(np.arange(len(shares), dtype=np.int64), shares)
    position = np.arange(len(owners)) - np.repeat(np.cumsum(shares) - shares, shares)
    return owners[np.argsort((position + 0.5) / shares[owners], kind="stable")]


def _apportion(count: int, weights: Sequence[int], phase: float) -> NDArray[np.int64]:
    """Divides ``count``, at most the sum of ``weights``, in proportion to ``weights``.

    Returns:
        The shares, ``[weights]``; none is larger than its weight.
    """
    # Integers: in floating point, a phase just below 1 could round a sum up.
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
