"""Stores: copies of pages from the device to host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from sgl_ext.memory.tickets import Priority, State, Ticket, outlast
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.demotion import Demotions
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.throughput import Traffic

_NO_PAGES: Pages = np.empty(0, np.int64)


@dataclass
class _Store:
    """Copy of pages from the device to host memory; ``ticket`` is None if nothing is copied."""

    keys: Sequence[Key]
    pages: Pages
    ticket: Ticket | None
    whole: bool
    """True if there was room for all pages that were to be stored."""
    success: bool | None = None
    """Result of the store; None while it is in progress."""


@dataclass(frozen=True, eq=False)
class Saved:
    """Copy of device blocks in host memory that is not in the index."""

    pages: Pages
    """Slots of host memory that the copy occupies."""
    ticket: Ticket


class Stores:
    """Stores in progress, in the order in which SGLang pops them."""

    def __init__(self, host: HostPages, copies: DeviceCopies, demotions: Demotions) -> None:
        self.priority = Priority.BULK
        """Priority of copies that are submitted from now on."""
        self.traffic = Traffic()
        """Pages copied by :meth:`store` and :meth:`store_lost`, and the seconds of these copies."""
        self.ended = 0
        """Number of stores that have ended, successfully or not."""
        self._host = host
        self._copies = copies
        self._demotions = demotions
        self._stores: deque[_Store] = deque()
        self._presumed = 0
        self._popped: list[_Store] = []
        """Stores in progress that were popped, or that are never popped."""
        self._dropped: list[Saved] = []
        self._again: list[Saved] = []

    def store(self, keys: Sequence[Key], blocks: Pages, before: Sequence[Key] = ()) -> None:
        """Starts to copy ``blocks`` of the device to host memory, as the pages of ``keys``.

        The blocks must not change before :meth:`pop`. Pages that are already in host memory are not
        copied, and pages for which there is no room are left out.

        Args:
            before: Keys of the pages before the first one, from the prompt's first page on.
        """
        wanted = self._host.missing(keys)
        if (store := self._begin(keys, blocks, wanted, before)) is None:
            store = _Store((), _NO_PAGES, None, not wanted, success=not wanted)
        self._stores.append(store)

    def store_lost(self, keys: Sequence[Key], blocks: Pages) -> None:
        """Starts to copy those of ``keys`` that SGLang considers stored but host memory lacks.

        Host memory has evicted such a page or had no room for it. The store is not popped: the next
        owner of the blocks waits for the copy (:attr:`DeviceCopies.in_flight`).
        """
        coming = {key for store in self._in_progress for key in store.keys}
        wanted = [at for at in self._host.missing(keys) if keys[at] not in coming]
        if (store := self._begin(keys, blocks, wanted)) is not None:
            self._popped.append(store)

    def completed(self) -> int:
        """Returns the number of stores that can be popped, counted from the oldest.

        These are the stores that have ended before the first one in progress, as :meth:`poll` found
        them, or more if :meth:`presume` was called.
        """
        over = sum(1 for _ in takewhile(lambda store: store.success is not None, self._stores))
        return max(over, self._presumed)

    def pop(self) -> bool:
        """Removes the oldest store, and returns whether all of its pages reached host memory.

        The result is a prediction if the store is only presumed to have ended.
        """
        store = self._stores.popleft()
        self._presumed = max(self._presumed - 1, 0)
        if store.success is None:
            self._popped.append(store)
            return store.whole
        return store.success

    def presume(self) -> int:
        """Presumes that all stores have ended, so that their blocks can be reused at once.

        The next owners of the blocks wait for the copies (:attr:`DeviceCopies.in_flight`).

        Returns:
            The number of stores that can be popped.
        """
        self._presumed = len(self._stores)
        return self._presumed

    def save(self, blocks: Pages) -> Saved | None:
        """Starts to copy ``blocks`` of the device to host memory, for their owner alone.

        Returns:
            The copy, which exists until :meth:`drop`; None if there is no room or the tiers are
            disabled.
        """
        if (pages := self._host.reserve(len(blocks))) is None:
            return None
        return Saved(pages, self._copies.store(blocks, pages, self.priority))

    def drop(self, saved: Saved) -> None:
        """Cancels a copy of :meth:`save`; its slots are freed once the copy has ended."""
        saved.ticket.cancel()
        self._dropped.append(saved)
        self._forget_dropped()

    def copy_again(self, keys: Sequence[Key], blocks: Pages) -> None:
        """Starts to copy ``blocks`` to the pages of ``keys``, which host memory already has.

        A baseline for measurements.
        """
        if keys:
            pages = self._host.places(keys)
            self._host.pin(pages)
            self._again.append(Saved(pages, self._copies.store(blocks, pages, self.priority)))

    def poll(self) -> None:
        """Processes copies that have ended."""
        for store in self._in_progress:
            if store.ticket is not None and store.ticket.poll():
                self._settle(store)
        if self._popped:
            self._popped = [store for store in self._popped if store.success is None]
        self._forget_dropped()

    @property
    def in_progress(self) -> int:
        """Number of stores in progress."""
        return len(self._in_progress)

    def storing(self, key: Key) -> bool:
        """Returns whether a store of ``key`` is in progress."""
        return any(key in store.keys for store in self._in_progress)

    def clear(self) -> None:
        """Cancels and forgets all stores; waits until none of them accesses the device."""
        for store in self._in_progress:
            if store.ticket is not None:
                store.ticket.cancel()
                outlast(store.ticket)
                self._settle(store)
        for saved in (*self._again, *self._dropped):
            outlast(saved.ticket)
        self._forget_dropped()
        self._stores.clear()
        self._popped.clear()
        self._presumed = 0

    @property
    def pinned(self) -> list[Pages]:
        """Pages of host memory that are pinned because copies write to them again."""
        return [saved.pages for saved in self._again]

    @property
    def reserved(self) -> list[Pages]:
        """Slots of stores in progress and of dropped copies."""
        stored = [store.pages for store in self._in_progress]
        return [*stored, *(saved.pages for saved in self._dropped)]

    def check_integrity(self) -> None:
        """Checks the stores against each other. O(pages).

        Raises:
            AssertionError: more stores are presumed to have ended than there are, a store is listed
                twice, or a store in progress has no copy or other numbers of keys and slots.
        """
        if not 0 <= self._presumed <= len(self._stores):
            raise AssertionError(f"{self._presumed} of {len(self._stores)} stores are presumed")
        every = [id(store) for store in (*self._stores, *self._popped)]
        if len({*every}) < len(every):
            raise AssertionError("a store that was popped is still to be popped")
        for store in self._in_progress:
            if store.ticket is None or not len(store.keys) == len(store.pages) > 0:
                raise AssertionError(f"a store of {len(store.keys)} pages copies nothing")

    @property
    def _in_progress(self) -> list[_Store]:
        return [store for store in (*self._stores, *self._popped) if store.success is None]

    def _begin(
        self, keys: Sequence[Key], blocks: Pages, wanted: Sequence[int], before: Sequence[Key] = ()
    ) -> _Store | None:
        """Starts to copy the pages at ``wanted`` as far as there is room; None if there is none.

        Args:
            wanted: Positions in ``keys`` and ``blocks`` of the pages to copy.
            before: Keys of the pages before the first of ``keys``.
        """
        # Pages of the same prompt are not evicted for these: without them, these are of no use.
        held = self._host.renew([*before, *keys])
        missing = wanted[: max(self._host.room - held, 0)]
        self._host.refuse(len(wanted) - len(missing))
        last = keys[missing[0] - 1 : missing[0]] if missing and missing[0] else before[-1:]
        after = self._host.place(last[0] if last else None)
        if not missing or (pages := self._host.reserve(len(missing), after)) is None:
            return None
        ticket = self._copies.store(blocks[missing], pages, self.priority)
        names = [keys[at] for at in missing]
        return _Store(names, pages, ticket, len(missing) == len(wanted))

    def _forget_dropped(self) -> None:
        over = [saved for saved in self._dropped if saved.ticket.poll()]
        for saved in over:
            self._dropped.remove(saved)
            self._host.release(saved.pages)
        for saved in [saved for saved in self._again if saved.ticket.poll()]:
            self._again.remove(saved)
            self._host.unpin(saved.pages)

    def _settle(self, store: _Store) -> None:
        self.ended += 1
        ticket = store.ticket
        if ticket is None or ticket.state != State.DONE:
            store.success = False
            self._host.release(store.pages)
            return
        store.success = store.whole
        self.traffic.add(len(store.pages), ticket.seconds)
        self._host.publish(store.keys, store.pages)
        self._demotions.offer(store.keys, self._host.places(store.keys))
