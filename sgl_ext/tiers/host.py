"""Which pages of KV lie in host memory, and where: index, use, pins and eviction."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.block_groups import BlockGroups
from sgl_ext.memory.runs import runs_of
from sgl_ext.tiers.arena import Key, Pages

logger = logging.getLogger(__name__)

_CHAINS = 64
"""Sequences that have room kept behind them: those that grew last."""
_EXPECTED_PAGES = 60
"""Of such a sequence, where there is room (FastSwitch §3.1)."""
_GHOSTS = 4
"""Pages that are remembered after eviction, as a multiple of those that there is room for."""


class HostPages:
    """Places ``0 .. capacity - 1`` of an arena and the pages that lie there.

    A place is free, held (by a transfer that fills it, until :meth:`publish` or :meth:`release`)
    or holds a page that can be found. Least recently used pages go first; of one prompt its tail
    before its head, because a page without those before it is of no use. Pinned ones stay.

    Not thread-safe: the scheduler's thread owns it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._groups = BlockGroups(capacity, page=1, first=0, expected_tokens=_EXPECTED_PAGES)
        self._chains: OrderedDict[int, None] = OrderedDict()
        self._chain_of = np.full(capacity, -1, np.int64)
        """Of each place; of those that nothing follows, any."""
        self._begun = 0
        self._index: OrderedDict[Key, int] = OrderedDict()
        self._pins = np.zeros(capacity, np.int32)
        self._pinned = 0  # places
        self._uses = np.zeros(capacity, np.uint32)
        self._copied = np.zeros(capacity, np.uint8)
        self._ghosts: OrderedDict[Key, int] = OrderedDict()
        """Uses of pages that were here; the ones that left last are kept."""
        self.evicted = 0
        """Pages that had to go, so far."""
        self.refused = 0
        """Pages for which there was no room, so far."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def room(self) -> int:
        """Places that :meth:`reserve` can give."""
        return self.free + len(self._index) - self._pinned

    @property
    def free(self) -> int:
        """Places that hold nothing."""
        return self._groups.available

    def lookup(self, keys: Sequence[Key]) -> int:
        """How many of ``keys`` are here, from the first on. Changes nothing."""
        return sum(1 for _ in takewhile(self._index.__contains__, keys))

    def missing(self, keys: Sequence[Key]) -> list[int]:
        """Positions in ``keys`` of those that are not here."""
        return [at for at, key in enumerate(keys) if key not in self._index]

    def present(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` that are here."""
        return [key for key in keys if key in self._index]

    def places(self, keys: Sequence[Key]) -> Pages:
        """Where ``keys``, which are all here, lie."""
        return np.fromiter(map(self._index.__getitem__, keys), np.int64, len(keys))

    def place(self, key: Key | None) -> int:
        """Where a page lies; -1 if it is not here."""
        return -1 if key is None else self._index.get(key, -1)

    def use(self, keys: Sequence[Key], times: int = 0) -> Pages:
        """Places of ``keys``, which are all here and are from now on the most recently used.

        Args:
            times: how often they were used by now, if it is more often than is known here.
        """
        pages = self.places(keys)
        deque(map(self._index.move_to_end, reversed(keys)), maxlen=0)
        self._uses[pages] = np.maximum(self._uses[pages] + (times == 0), times)
        return pages

    def reserve(self, count: int, behind: int | None = None) -> Pages | None:
        """Holds ``count`` places, as few runs as can be; evicts what must go.

        Args:
            behind: place of the page that they follow on, next to which they lie if there is room;
                -1 if they begin a sequence. Room is kept for what will follow on them (FastSwitch
                §3.3); none is without.

        Returns:
            The places; None, with nothing changed, if too many are pinned or held.
        """
        if count > self.capacity or not self._evict(count - self._groups.available):
            return None
        chain = None if behind is None else self._chain(behind)
        (runs,) = self._groups.allocate([(chain, count)]) or [[]]
        found = [np.arange(start, start + length) for start, length in runs]
        pages = np.concatenate(found) if found else np.empty(0, np.int64)
        self._chain_of[pages] = -1 if chain is None else chain
        return pages

    def refuse(self, count: int) -> None:
        """Takes note of pages that cannot be held; the first time it says so."""
        if count and not self.refused:
            logger.warning(
                "host memory for tiers has no room for %d pages (it has %d places, %d in use by "
                "transfers): they are computed instead, or not kept; tiers.host.capacity, or "
                "tiers.staging where there is no host tier, should hold several prompts",
                count, self.capacity, self.capacity - self.room,
            )  # fmt: skip
        self.refused += count

    def publish(self, keys: Sequence[Key], pages: Pages) -> None:
        """Held ``pages`` have the KV of ``keys``; of a key that is here the page is given back."""
        fresh = [at for at, key in enumerate(keys) if key not in self._index]
        if len(fresh) < len(keys):
            self.release(np.delete(pages, fresh))
            keys, pages = [keys[at] for at in fresh], pages[fresh]
        # A page that was here before has been seen before, wherever it has been since.
        seen = [self._ghosts.pop(key, 0) for key in keys]
        self._uses[pages] = np.fromiter(seen, np.uint32, len(seen)) + 1
        self._copied[pages] = 0
        self._index.update(zip(reversed(keys), reversed(pages.tolist()), strict=True))

    def release(self, pages: Pages) -> None:
        """Gives held places back."""
        self._groups.release(runs_of(pages))

    def pin(self, pages: Pages) -> None:
        """Keeps these pages, each named once, until as many ``unpin``."""
        self._pinned += int(np.count_nonzero(self._pins[pages] == 0))
        self._pins[pages] += 1

    def unpin(self, pages: Pages) -> None:
        self._pins[pages] -= 1
        self._pinned -= int(np.count_nonzero(self._pins[pages] == 0))

    def worth_keeping(self, pages: Pages, uses: int, tier: int) -> NDArray[np.bool_]:
        """Which of ``pages`` were used so often and are not with ``tier``."""
        there = (self._copied[pages] & (1 << tier)) != 0
        worth: NDArray[np.bool_] = (self._uses[pages] >= uses) & ~there
        return worth

    def mark_copied(self, pages: Pages, tier: int, copied: bool) -> None:
        """Tier number ``tier`` (up to 7) has these pages, or is about to; or it does not."""
        self._copied[pages] &= ~np.uint8(1 << tier)
        self._copied[pages] |= np.uint8(copied << tier)

    def clear(self) -> None:
        """Forgets every page that is not pinned, and remembers how often each was used."""
        self._remove([key for key, page in self._index.items() if not self._pins[page]])
        for chain in self._chains:
            self._groups.close(chain)
        self._chains.clear()

    def _chain(self, behind: int) -> int:
        """The owner of the room behind a place."""
        chain = int(self._chain_of[behind]) if behind >= 0 else -1
        if chain not in self._chains:
            chain, self._begun = self._begun, self._begun + 1
        self._chains[chain] = None
        self._chains.move_to_end(chain)
        if len(self._chains) > _CHAINS:
            self._groups.close(self._chains.popitem(last=False)[0])
        return chain

    def _evict(self, count: int) -> bool:
        if count <= 0:
            return True
        unpinned = (key for key, page in self._index.items() if not self._pins[page])
        keys = list(islice(unpinned, count))
        if len(keys) < count:
            return False
        self.evicted += count
        self._remove(keys)
        return True

    def _remove(self, keys: Sequence[Key]) -> None:
        pages = np.fromiter(map(self._index.pop, keys), np.int64, len(keys))
        self._ghosts.update(zip(keys, self._uses[pages].tolist(), strict=True))
        while len(self._ghosts) > _GHOSTS * self.capacity:
            self._ghosts.popitem(last=False)
        self._groups.release(runs_of(np.sort(pages)))

    def check_integrity(self) -> None:
        """Raises AssertionError if a place is counted twice or not at all. O(capacity)."""
        self._groups.check_integrity()
        places = sorted(self._index.values())
        in_use = self.capacity - self.free
        if len(set(places)) < len(places) or len(places) > in_use:
            raise AssertionError(f"{len(places)} pages lie in {in_use} places: {places}")
        if (self._pins < 0).any():
            raise AssertionError(f"unpinned too often: {np.flatnonzero(self._pins < 0)}")
        if self._pinned != np.count_nonzero(self._pins):
            raise AssertionError(f"{self._pinned} places are counted as pinned: {self._pins}")
