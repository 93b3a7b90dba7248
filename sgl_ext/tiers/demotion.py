"""Demotion: the choice and the flow of pages that are copied from host memory to a lower tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sgl_ext.planning.costs import Costs
from sgl_ext.planning.leaving import store_after
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, Pending, result_of

_AT_ONCE = 8
"""Divisor of host memory for the largest batch; up to two batches of a tier are pinned."""
_LARGEST_BYTES = 64 << 20
"""Largest batch in bytes: enough parallel I/O for a device, little to lose if it becomes full."""

_NONE = np.empty(0, np.int64)


@dataclass
class _Batch:
    pages: Pages
    stored: Pending[NDArray[np.bool_]]


class Demotion:
    """Queue of pages that one lower tier should store because they were used often enough.

    Queued pages are not pinned: a page that is evicted before it is written was not worth keeping.

    Args:
        number: Number of the tier in :class:`HostPages`.
        page_bytes: Bytes of a page.
        costs: Cost model that decides how often.
    """

    def __init__(
        self, number: int, lower: LowerTier, host: HostPages, page_bytes: int, costs: Costs
    ) -> None:
        self._number = number
        self._lower = lower
        self._host = host
        self._costs = costs
        self._waiting: dict[Key, None] = {}
        self._batches: list[_Batch] = []
        self._largest = max(min(host.capacity // _AT_ONCE, _LARGEST_BYTES // page_bytes), 1)

    def offer(self, keys: Sequence[Key], pages: Pages, *, always: bool = False) -> None:
        """Queues those of ``pages``, which hold ``keys``, that are worth keeping in the tier.

        Called when pages have arrived in host memory or were used.

        Args:
            always: whether they are worth it however often they were used.
        """
        if not keys:
            return
        after = 0 if always else self._lower.keep_after
        if after is None:
            after = store_after(self._costs, self._host.reuse, self._lower.tier.name)
        # Not of pages that are to be kept by all means: their owner asks next whether they are.
        due = _NONE if always else pages[self._host.due_again(pages, self._number)]
        if len(due) and len(due := due[~np.isin(due, np.concatenate([_NONE, *self.pinned]))]):
            self._host.mark_copied(due, self._number, False)
        worth = self._host.worth_keeping(pages, after, self._number)
        self._waiting.update(dict.fromkeys(keys[at] for at in np.flatnonzero(worth).tolist()))
        for key in list(islice(self._waiting, max(len(self._waiting) - self._host.capacity, 0))):
            del self._waiting[key]  # bounds the queue when the tier hangs

    def advance(self) -> None:
        """Unpins the pages of finished stores and starts new stores, at most two at a time.

        Empties the queue if the tier is not available.
        """
        for batch in [batch for batch in self._batches if batch.stored.done()]:
            self._batches.remove(batch)
            stored = result_of(batch.stored, np.zeros(len(batch.pages), np.bool_))
            self._host.mark_copied(batch.pages[~stored], self._number, False)
            self._host.unpin(batch.pages)
        if not self._lower.tier.available:
            self._waiting.clear()
        while self._waiting and len(self._batches) < 2:
            self._begin()

    @property
    def pinned(self) -> list[Pages]:
        """Pages of the stores in progress, which are pinned."""
        return [batch.pages for batch in self._batches]

    def check_integrity(self) -> None:
        """Checks the sizes of queue and stores, and that stored pages are marked. O(pages).

        Raises:
            AssertionError: there are too many stores, a page is stored twice, or a page that is
                being stored is not marked as copied.
        """
        if len(self._batches) > 2 or len(self._waiting) > self._host.capacity:
            raise AssertionError(
                f"{len(self._batches)} stores are in progress, {len(self._waiting)} pages queued"
            )
        pages = np.concatenate([_NONE, *self.pinned])
        if len(np.unique(pages)) < len(pages):
            raise AssertionError(f"a page is stored twice: {np.sort(pages)}")
        if self._host.worth_keeping(pages, 0, self._number).any():
            raise AssertionError(f"some of {pages} are being stored, and not marked as copied")

    def _begin(self) -> None:
        keys = list(islice(self._waiting, self._largest))
        for key in keys:
            del self._waiting[key]
        keys = self._host.present(keys)
        pages = self._host.places(keys)
        worth = self._host.worth_keeping(pages, 0, self._number)  # not stored since
        if not worth.any():
            return
        pages, keys = pages[worth], [keys[at] for at in np.flatnonzero(worth).tolist()]
        self._host.mark_copied(pages, self._number, True)
        self._host.pin(pages)
        self._batches.append(_Batch(pages, self._lower.store(keys, pages)))


class Demotions:
    """Demotion to each lower tier.

    Args:
        lower: Lower tiers, the nearest first.
        page_bytes: Bytes of a page.
        costs: Cost model of the scheduler.
    """

    def __init__(
        self, lower: Sequence[LowerTier], host: HostPages, page_bytes: int, costs: Costs
    ) -> None:
        self._each = [Demotion(at, tier, host, page_bytes, costs) for at, tier in enumerate(lower)]

    def offer(self, keys: Sequence[Key], pages: Pages, *, always: bool = False) -> None:
        """Offers ``pages``, which hold ``keys``, to each tier; see :meth:`Demotion.offer`."""
        for demotion in self._each:
            demotion.offer(keys, pages, always=always)

    def advance(self) -> None:
        """Takes every step that needs no waiting."""
        for demotion in self._each:
            demotion.advance()

    @property
    def pinned(self) -> list[Pages]:
        """Pages of the stores in progress, which are pinned."""
        return [pages for demotion in self._each for pages in demotion.pinned]

    def check_integrity(self) -> None:
        """Checks each demotion; see :meth:`Demotion.check_integrity`."""
        for demotion in self._each:
            demotion.check_integrity()
