"""Tier stack: host memory, the lower tiers, and the copies between them and the device."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, TypedDict

import numpy as np

from sgl_ext.clock import Clock
from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.slab import Layout
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Priority, State, Ticket, outlast
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies, LayerLoads
from sgl_ext.tiers.demotion import Demotion
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, Traffic, running_rate
from sgl_ext.tiers.waiting import Waiting

_NO_PAGES: Pages = np.empty(0, np.int64)

logger = logging.getLogger(__name__)


class Restored(TypedDict):
    """KV that one tier contributed to the load of a request."""

    tokens: int
    bytes: int
    seconds: float
    """Seconds of the load into host memory; for the host tier, of the copy of all pages to the
    device."""


class _Load(NamedTuple):
    pages: Pages
    blocks: Pages
    restored: Restored


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


class TierStack:
    """Interface of the tiers to the scheduler.

    Not thread-safe: only the scheduler's thread calls it. No method waits for a device except
    :meth:`fill`, :meth:`finish`, :meth:`clear` and :meth:`close`; :meth:`wait` sleeps.

    Args:
        lower: Lower tiers, the nearest first.
        wait: Seconds that a request is held back, at most, while its pages come from lower tiers.
        wake: Set by the threads of lower tiers when they have finished something.
        spare: Slots of host memory that these pages leave free.
        clock: Clock of deadlines and leases of waiting requests.
        closing: Called by :meth:`close`, in order, after all tiers are closed.
    """

    def __init__(
        self,
        host: HostPages,
        copies: DeviceCopies,
        loads: LayerLoads,
        lower: Sequence[LowerTier],
        *,
        wait: float,
        wake: threading.Event,
        spare: int = 0,
        clock: Clock = time.monotonic,
        closing: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.host = host
        self.loads = loads
        self.lower = lower
        self.hits: Counter[str] = Counter()
        """Pages that requests loaded, by the name of the tier that had them."""
        self.computed_pages_per_second: float | None = None
        """Moving average of the throughput of forwards, in pages per second; None before the first.

        Requests do not wait for a tier that is slower."""
        self.loaded = Traffic()
        """Pages copied to the device by :meth:`start`, and the seconds of these loads."""
        self.stored = Traffic()
        """Pages copied from the device by :meth:`store` and :meth:`store_lost`, and the seconds of
        these copies."""
        self.stores = Priority.BULK
        """Priority of copies from the device that are submitted from now on."""
        self._copies = copies
        self._wake = wake
        self._closing = closing
        self._waiting = Waiting(host, lower, wait, spare=spare, clock=clock)
        self.keepers: list[Callable[[], bool]] = [self._waiting.give_up_one]
        """Functions that unpin the pages kept for one waiting request; each returns False if it
        keeps no pages."""
        self._restored: dict[str, dict[str, Restored]] = {}
        self._queued: dict[str, _Load] = {}
        self._loading: dict[int, list[_Load]] = {}
        self._stores: deque[_Store] = deque()
        self._presumed = 0
        self.ended = 0
        """Number of stores that have ended, successfully or not."""
        self._behind: list[_Store] = []
        """Stores in progress that were popped already or are never popped."""
        self._dropped: list[Saved] = []
        self._again: list[Saved] = []
        page_bytes = copies.layout.block_bytes
        self._demotions = [Demotion(at, tier, host, page_bytes) for at, tier in enumerate(lower)]
        self._off: str | None = None

    # --- loads ------------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: Sequence[Key]) -> int:
        """Returns the number of leading ``keys`` that can be loaded now.

        Starts to load the pages that follow from lower tiers; :meth:`ready` tells when they have
        landed.
        """
        here = self.here(keys)
        if self._off is None:
            self._waiting.ask(rid, keys, here, self.computed_pages_per_second)
        return here

    def here(self, keys: Sequence[Key]) -> int:
        """Returns the number of leading ``keys`` in host memory; 0 if the tiers are disabled."""
        return 0 if self._off is not None else self.host.lookup(keys)

    def ready(self, rid: str) -> bool:
        """Returns whether the request need not be held back for pages from lower tiers.

        True if it does not wait, its load has ended, or it was held back for the longest time
        allowed. Call it when the request is considered for admission: the first call starts this
        time.
        """
        return self._waiting.ready(rid)

    def load(self, rid: str, keys: Sequence[Key], blocks: Pages) -> bool:
        """Queues a load of ``keys`` into ``blocks`` of the device for :meth:`start`.

        Returns:
            False, with nothing queued, if a page is not in host memory or the tiers are disabled.
        """
        if self._off is not None or self.host.lookup(keys) < len(keys):
            return False
        pages = self.host.use(keys)
        self.host.pin(pages)
        restored: dict[str, Restored] = {}
        left = len(keys)
        if (staging := self._waiting.leave(rid)) is not None:
            for name, count in staging.landed.items():
                self._count(restored, name, min(count, left), staging.seconds)
                left -= min(count, left)
        self._count(restored, "host", left, 0.0)
        self._restored[rid] = restored
        self._queued[rid] = _Load(pages, blocks, restored["host"])
        self._offer(keys, pages)
        return True

    def take_restored(self, rid: str) -> dict[str, Restored]:
        """Returns and forgets the contribution of each tier to the request's load, by tier name.

        Empty if the request loaded nothing. The seconds of the host tier are 0 until :meth:`finish`
        has returned True for the load.
        """
        return self._restored.pop(rid, {})

    def start(self) -> int:
        """Starts the queued loads, layer by layer, as one load.

        Returns:
            The number of the load in :class:`LayerLoads`; -1 if nothing is queued.
        """
        if not self._queued:
            self.loads.set_consumer(-1)
            return -1
        loads = [*self._queued.values()]
        self._queued.clear()
        pages, blocks = (np.concatenate(parts) for parts in list(zip(*loads, strict=True))[:2])
        index = self.loads.start(self._copies.load(pages, blocks))
        # The batch that is being built runs next. SGLang sets the consumer for generation only,
        # and an embedding request would attend to KV that has not landed.
        self.loads.set_consumer(index)
        self._loading[index] = loads
        return index

    def finish(self, index: int) -> bool:
        """Waits until a load has ended; returns whether all of it has landed.

        Raises:
            TimeoutError: A copy is still in progress.
        """
        seconds = self.loads.finish(index)
        for load in self._loading.pop(index, ()):
            self.host.unpin(load.pages)
            if seconds is not None:
                load.restored["seconds"] = seconds
                self.loaded.pages += len(load.pages)
        self.loaded.seconds += seconds or 0.0
        return seconds is not None

    def cancel(self, rid: str) -> bool:
        """Forgets a request and cancels its queued load; returns whether a load was queued.

        A load that has started is not cancelled.
        """
        self.forget(rid)
        if (queued := self._queued.pop(rid, None)) is None:
            return False
        self.host.unpin(queued.pages)
        return True

    def forget(self, rid: str) -> None:
        """Forgets that a request waits; loads from lower tiers that have begun still land."""
        self._waiting.leave(rid)
        self._restored.pop(rid, None)

    def hold(self, rid: str, keys: Sequence[Key]) -> Pages:
        """Pins the leading ``keys`` that are in host memory until :meth:`let_go`.

        The request does not wait for lower tiers any more.

        Returns:
            The slots of these pages; empty if the tiers are disabled.
        """
        self._waiting.leave(rid)
        here = keys[: self.host.lookup(keys)] if self._off is None else ()
        pages = self.host.use(here)
        self.host.pin(pages)
        self.hits["host"] += len(pages)
        self._offer(here, pages)
        return pages

    def fill(self, pages: Pages, blocks: Pages) -> None:
        """Copies pinned ``pages`` into ``blocks`` of the device, and waits for the copy.

        Raises:
            TimeoutError: The copy is still in progress; the blocks must not be read.
            TransferError: The copy failed; the blocks must not be read.
            TransferCancelledError: The engine was closed; the blocks must not be read.
        """
        self.begin_fill(pages, blocks).wait(COPY_DEADLINE_S)

    def begin_fill(self, pages: Pages, blocks: Pages) -> Ticket:
        """Starts to copy pinned ``pages`` into ``blocks`` of the device."""
        return self._copies.fill(pages, blocks)

    def fill_from_the_top(self, pages: Pages, blocks: Pages) -> list[Ticket]:
        """Starts to copy pinned ``pages`` into ``blocks`` of the device, the last layer first.

        Returns:
            One ticket for each layer; the index is the layer's number.
        """
        return self._copies.load_from_the_top(pages, blocks)

    def let_go(self, pages: Pages) -> None:
        """Unpins ``pages`` that :meth:`hold` has pinned."""
        self.host.unpin(pages)

    def addresses(self, pages: Pages) -> Pages:
        """Returns the address of the first byte of each of ``pages``."""
        return self._copies.addresses(pages)

    def used(self, keys: Sequence[Key], times: int) -> None:
        """Records that ``keys``, which are also on the device, have been used ``times`` times.

        Keys that are not in host memory are ignored.
        """
        keys = self.host.present(keys)
        self._offer(keys, self.host.use(keys, times))

    # --- stores -----------------------------------------------------------------------------------

    def store(self, keys: Sequence[Key], blocks: Pages, parent: Key | None = None) -> None:
        """Starts to copy ``blocks`` of the device to host memory, as the pages of ``keys``.

        The blocks must not change before :meth:`pop`. Pages that are already in host memory are not
        copied, and pages for which there is no room are left out.

        Args:
            parent: Key of the page before the first one; None if there is none.
        """
        wanted = self.host.missing(keys)
        if (store := self._begin(keys, blocks, wanted, parent)) is None:
            store = _Store((), _NO_PAGES, None, not wanted, success=not wanted)
        self._stores.append(store)

    def store_lost(self, keys: Sequence[Key], blocks: Pages) -> None:
        """Starts to copy those of ``keys`` that SGLang considers stored but host memory lacks.

        Host memory has evicted such a page or had no room for it. The store is not popped: the next
        owner of the blocks waits for the copy (:attr:`in_flight`).
        """
        coming = {key for store in self._under_way for key in store.keys}
        wanted = [at for at in self.host.missing(keys) if keys[at] not in coming]
        if (store := self._begin(keys, blocks, wanted)) is not None:
            self._behind.append(store)

    def completed(self) -> int:
        """Returns the number of stores that can be popped, counted from the oldest.

        These are the stores that have ended before the first one in progress, or more if
        :meth:`presume` was called.
        """
        self.poll()
        over = sum(1 for _ in takewhile(lambda store: store.success is not None, self._stores))
        return max(over, self._presumed)

    def pop(self) -> bool:
        """Removes the oldest store, and returns whether all of its pages reached host memory.

        The result is a prediction if the store is only presumed to have ended.
        """
        store = self._stores.popleft()
        self._presumed = max(self._presumed - 1, 0)
        if store.success is None:
            self._behind.append(store)
            return store.whole
        return store.success

    def presume(self) -> int:
        """Presumes that all stores have ended, so that their blocks can be reused at once.

        The next owners of the blocks wait for the copies (:attr:`in_flight`).

        Returns:
            The number of stores that can be popped.
        """
        self._presumed = len(self._stores)
        return self._presumed

    def make_room(self, count: int) -> None:
        """Unpins pages kept for waiting requests until host memory has room for ``count`` pages.

        Makes room for a request that is being preempted. There may be less room in the end.
        """
        for give_up_one in self.keepers:
            while self.host.room < count and give_up_one():
                pass

    def save(self, blocks: Pages) -> Saved | None:
        """Starts to copy ``blocks`` of the device to host memory, for their owner alone.

        Returns:
            The copy, which exists until :meth:`drop`; None if there is no room or the tiers are
            disabled.
        """
        if self._off is not None or (pages := self.host.reserve(len(blocks))) is None:
            return None
        return Saved(pages, self._copies.store(blocks, pages, self.stores))

    def copy_again(self, keys: Sequence[Key], blocks: Pages) -> None:
        """Starts to copy ``blocks`` to the pages of ``keys``, which host memory already has.

        A baseline for measurements.
        """
        if keys:
            pages = self.host.places(keys)
            self.host.pin(pages)
            self._again.append(Saved(pages, self._copies.store(blocks, pages, self.stores)))

    def drop(self, saved: Saved) -> None:
        """Cancels a copy of :meth:`save`; its slots are freed once the copy has ended."""
        saved.ticket.cancel()
        self._dropped.append(saved)
        self._forget_dropped()

    # --- progress and state -----------------------------------------------------------------------

    def poll(self) -> None:
        """Processes copies and lower-tier work that have ended, and starts the work that follows.

        The scheduler calls it at least once in each step.
        """
        for store in self._under_way:
            if store.ticket is not None and store.ticket.poll():
                self._settle(store)
        if self._behind:
            self._behind = [store for store in self._behind if store.success is None]
        self._forget_dropped()
        self._waiting.advance()
        for demotion in self._demotions:
            demotion.advance()

    @property
    def layout(self) -> Layout:
        """Layout of a page."""
        return self._copies.layout

    @property
    def enabled(self) -> bool:
        """True unless the tiers were disabled or closed."""
        return self._off is None

    @property
    def stores_under_way(self) -> int:
        """Number of stores in progress."""
        return len(self._under_way)

    def storing(self, key: Key) -> bool:
        """Returns whether a store of ``key`` is in progress."""
        return any(key in store.keys for store in self._under_way)

    @property
    def in_flight(self) -> BlocksInFlight:
        """Blocks of the device that copies read or write."""
        return self._copies.in_flight

    def computed(self, tokens: int, seconds: float) -> None:
        """Records that a forward computed ``tokens`` new tokens in ``seconds``."""
        rate = tokens / self.layout.page / seconds
        self.computed_pages_per_second = running_rate(self.computed_pages_per_second, rate)

    def pending(self) -> bool:
        """Returns whether a request waits for a lower tier."""
        return self._waiting.pending()

    def wait(self, timeout: float) -> None:
        """Sleeps until a thread of a lower tier has finished something, ``timeout`` s at most."""
        self._wake.wait(timeout)
        self._wake.clear()

    def clear(self) -> None:
        """Forgets all requests and removes the unpinned pages from host memory.

        Cancels stores, and waits until no load or store accesses the device.

        Raises:
            TimeoutError: A load is still in progress.
        """
        self._waiting.leave_all()
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._loading):
            self.finish(index)
        for store in self._under_way:
            if store.ticket is not None:
                store.ticket.cancel()
                outlast(store.ticket)
                self._settle(store)
        for saved in self._again:
            outlast(saved.ticket)
        self._forget_dropped()
        self._stores.clear()
        self._behind.clear()
        self._presumed = 0
        self.host.clear()

    def disable(self, reason: str) -> None:
        """Disables the tiers: no page is found or stored any more. Logs ``reason``."""
        if self._off is None:
            logger.warning("the tiers are disabled from now on: %s", reason)
            self._off = reason
            # Copies in progress are not cancelled: SGLang expects a result for each.
            self._waiting.leave_all()
            self.host.clear()

    def close(self) -> None:
        """Clears and closes the stack and all tiers."""
        self.clear()
        self._off = "closed"
        for tier in self.lower:
            tier.close()
        for close in self._closing:
            close()

    def check_integrity(self) -> None:
        """Checks host memory, waiting requests and stores. O(capacity).

        Raises:
            AssertionError: they disagree.
        """
        self.host.check_integrity()
        self._waiting.check_integrity()
        if self._presumed > len(self._stores):
            raise AssertionError(f"{self._presumed} of {len(self._stores)} stores are presumed")
        if unreported := self._queued.keys() - self._restored.keys():
            raise AssertionError(f"{unreported} have a load, and no report of it")

    @property
    def _under_way(self) -> list[_Store]:
        return [store for store in (*self._stores, *self._behind) if store.success is None]

    def _begin(
        self, keys: Sequence[Key], blocks: Pages, wanted: Sequence[int], parent: Key | None = None
    ) -> _Store | None:
        """Starts to copy the pages at ``wanted`` as far as there is room; None if there is none.

        Args:
            wanted: Positions in ``keys`` and ``blocks`` of the pages to copy.
            parent: Key of the page before the first of ``keys``.
        """
        missing = wanted[: self.host.room if self._off is None else 0]
        if self._off is None:
            self.host.refuse(len(wanted) - len(missing))
        before = keys[missing[0] - 1] if missing and missing[0] else parent
        behind = self.host.place(before)
        if not missing or (pages := self.host.reserve(len(missing), behind)) is None:
            return None
        ticket = self._copies.store(blocks[missing], pages, self.stores)
        names = [keys[at] for at in missing]
        return _Store(names, pages, ticket, len(missing) == len(wanted))

    def _forget_dropped(self) -> None:
        over = [saved for saved in self._dropped if saved.ticket.poll()]
        for saved in over:
            self._dropped.remove(saved)
            self.host.release(saved.pages)
        for saved in [saved for saved in self._again if saved.ticket.poll()]:
            self._again.remove(saved)
            self.host.unpin(saved.pages)

    def _count(self, restored: dict[str, Restored], name: str, pages: int, seconds: float) -> None:
        self.hits[name] += pages
        page, block_bytes = self.layout.page, self.layout.block_bytes
        restored[name] = Restored(tokens=pages * page, bytes=pages * block_bytes, seconds=seconds)

    def _settle(self, store: _Store) -> None:
        self.ended += 1
        ticket = store.ticket
        if ticket is None or ticket.state != State.DONE:
            store.success = False
            self.host.release(store.pages)
            return
        store.success = store.whole
        self.stored.add(len(store.pages), ticket.seconds)
        self.host.publish(store.keys, store.pages)
        self._offer(store.keys, self.host.places(store.keys))

    def _offer(self, keys: Sequence[Key], pages: Pages) -> None:
        for demotion in self._demotions:
            demotion.offer(keys, pages)
