"""Order in which pages leave host memory: the ones that will most probably be used again stay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sgl_ext.planning.leaving import MOST, Reuse
from sgl_ext.tiers.arena import Key, Pages


class EvictionOrder:
    """Uses of the pages in host memory, and the pages to evict first.

    The rate at which a page is used is estimated as the probability that it is used again, given
    its number of uses, divided by the time since its last use (as in Hyperbolic Caching, Blankstein
    et al., USENIX ATC 2017). The page with the lowest rate is evicted first. Time is counted in
    uses of pages. Among pages with equally many uses this is the least recently used one.

    A page has at least as many uses as the pages behind it in a prompt. If they are used together,
    it is therefore not evicted before them: without it they could not be loaded.

    Args:
        capacity: number of slots.
        ghosts: maximum number of pages whose uses are kept after they were removed.
    """

    def __init__(self, capacity: int, ghosts: int) -> None:
        self.reuse = Reuse()
        """How often pages are used again, also after they were evicted."""
        self.uses = np.zeros(capacity, np.uint32)
        """Uses of the page in each slot, ``[capacity]``."""
        self._used_at = np.zeros(capacity, np.int64)
        self._now = 0
        self._lists: list[OrderedDict[Key, None]] = [OrderedDict() for _ in range(MOST)]
        """Pages with 1, 2, … and at least :data:`MOST` uses, each list in the order of last use."""
        self._ghosts: OrderedDict[Key, int] = OrderedDict()
        """Uses of removed pages by key; the pages that were removed last are kept."""
        self._most_ghosts = ghosts

    def add(self, keys: Sequence[Key], pages: Pages) -> None:
        """Records that ``pages`` hold new pages, and are used once more than before they left."""
        before = np.array([self._ghosts.pop(key, 0) for key in keys], np.uint32)
        after = before + np.uint32(1)
        self.reuse.used(before, after)
        self._touch(pages, after)
        for key, number in zip(reversed(keys), reversed(_lists(after)), strict=True):
            self._lists[number][key] = None

    def use(self, keys: Sequence[Key], pages: Pages, times: int = 0) -> None:
        """Records a use of ``pages``, of the first one last; see :meth:`HostPages.use`."""
        before = self.uses[pages]
        after = np.maximum(before + np.uint32(times == 0), np.uint32(times))
        self.reuse.used(before, after)
        self._touch(pages, after)
        old, new = _lists(before), _lists(after)
        for key, here, there in zip(reversed(keys), reversed(old), reversed(new), strict=True):
            if here == there:
                self._lists[here].move_to_end(key)
            else:
                self._lists[here].pop(key, None)
                self._lists[there][key] = None

    def remove(self, keys: Sequence[Key], pages: Pages) -> None:
        """Removes pages, and keeps their number of uses."""
        uses = self.uses[pages]
        for key, number in zip(keys, _lists(uses), strict=True):
            del self._lists[number][key]
        self._ghosts.update(zip(keys, uses.tolist(), strict=True))
        while len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def first(
        self, count: int, place: Callable[[Key], int], pins: NDArray[np.int32]
    ) -> list[Key] | None:
        """Returns the ``count`` pages without pins to evict first; None if there are fewer.

        Args:
            place: returns the slot of a page.
            pins: number of pins of each slot, ``[capacity]``.
        """
        keys: list[Key] = []
        rates: list[float] = []
        for number, each in enumerate(self._lists):
            some = [*islice(_unpinned(each, place, pins), count)]
            rates += [self.reuse.again(number + 1)] * len(some)
            keys += some
        if len(keys) < count:
            return None
        ages = self._now + 1 - self._used_at[np.fromiter(map(place, keys), np.int64, len(keys))]
        order = np.argsort(np.array(rates) / ages, kind="stable")
        return [keys[at] for at in order[:count].tolist()]

    def _touch(self, pages: Pages, uses: NDArray[np.uint32]) -> None:
        self.uses[pages] = uses
        self._now += len(pages)
        self._used_at[pages] = self._now - np.arange(len(pages))

    def check_integrity(self, index: dict[Key, int]) -> None:
        """Checks that each page is in the list of its uses. O(pages).

        Args:
            index: slots of the pages by key.

        Raises:
            AssertionError: a page is in another list or in none, or a list has other pages.
        """
        listed = {key: number for number, each in enumerate(self._lists) for key in each}
        pages = np.fromiter(index.values(), np.int64, len(index))
        if listed != dict(zip(index, _lists(self.uses[pages]), strict=True)) or len(listed) != sum(
            map(len, self._lists)
        ):
            raise AssertionError(f"the lists of {len(index)} pages do not match their uses")


def _lists(uses: NDArray[np.uint32]) -> list[int]:
    """Returns the number of the list of pages with so many uses each."""
    found: list[int] = (np.clip(uses, 1, MOST) - 1).tolist()
    return found


def _unpinned(
    keys: OrderedDict[Key, None], place: Callable[[Key], int], pins: NDArray[np.int32]
) -> Iterator[Key]:
    return (key for key in keys if not pins[place(key)])
