"""Tier stack: host memory, the lower tiers, and the copies between them and the device."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from sgl_ext.clock import Clock
from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.slab import Layout
from sgl_ext.memory.streams import Streams
from sgl_ext.planning.costs import Costs
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies, LayerLoads
from sgl_ext.tiers.demotion import Demotions
from sgl_ext.tiers.holds import Holds
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.loads import Loads
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.stores import Stores
from sgl_ext.tiers.waiting import Waiting

logger = logging.getLogger(__name__)


class Wake(Protocol):
    """Event that wakes the scheduler, such as a ``threading.Event``."""

    def wait(self, timeout: float) -> object:
        """Sleeps until the event is set, at most ``timeout`` seconds."""

    def clear(self) -> None:
        """Resets the event."""


class TierStack:
    """Interface of the tiers to the scheduler.

    Not thread-safe: only the scheduler's thread calls it. No method of it, its loads, stores and
    holds waits for a device except :meth:`Loads.finish`, :meth:`Holds.fill`, :meth:`clear` and
    :meth:`close`; :meth:`wait` sleeps.

    Args:
        lower: Lower tiers, the nearest first.
        costs: Cost model of the scheduler.
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
        layers: LayerLoads,
        lower: Sequence[LowerTier],
        *,
        costs: Costs,
        wait: float,
        wake: Wake,
        clock: Clock,
        spare: int = 0,
        closing: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.host = host
        self.lower = lower
        self.hits: Counter[str] = Counter()
        """Pages that requests loaded, by the name of the tier that had them."""
        for tier in lower:
            costs.open(tier.tier.name)
        self._copies = copies
        self._wake = wake
        self._closing = closing
        self._waiting = Waiting(
            host, lower, wait, costs=costs, page=copies.layout.page, spare=spare, clock=clock
        )
        self.keepers: list[Callable[[], bool]] = [self._waiting.give_up_one]
        """Functions that unpin the pages kept for one waiting request; each returns False if it
        keeps no pages."""
        self._demotions = Demotions(lower, host, copies.layout.block_bytes)
        self.loads = Loads(host, copies, layers, self.hits)
        self.stores = Stores(host, copies, self._demotions)
        self.holds = Holds(host, copies, self._waiting, self._demotions, self.hits)

    # --- requests ---------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: Sequence[Key], begin: int = 0) -> int:
        """Returns the number of leading ``keys`` that can be loaded now.

        Starts to load the pages that follow from lower tiers, unless computing them is expected to
        be faster; :meth:`ready` tells when they have landed.

        Args:
            begin: Position of the first of ``keys`` in the prompt, in pages.
        """
        here = self.host.lookup(keys)
        if self.enabled:
            self._waiting.ask(rid, keys, here, begin)
        return here

    def ready(self, rid: str) -> bool:
        """Returns whether the request need not be held back for pages from lower tiers.

        True if it does not wait, its load has ended, or it was held back for the longest time
        allowed. Call it when the request is considered for admission: the first call starts this
        time.
        """
        return self._waiting.ready(rid)

    def load(self, rid: str, keys: Sequence[Key], blocks: Pages) -> bool:
        """Queues a load of ``keys`` into ``blocks`` of the device for :meth:`Loads.start`.

        Returns:
            False, with nothing queued, if a page is not in host memory or the tiers are disabled.
        """
        if not self.enabled or self.host.lookup(keys) < len(keys):
            return False
        staging = self._waiting.leave(rid)
        landed, seconds = ({}, 0.0) if staging is None else (staging.landed, staging.seconds)
        self._demotions.offer(keys, self.loads.queue(rid, keys, blocks, landed, seconds))
        return True

    def cancel(self, rid: str) -> bool:
        """Forgets a request and cancels its queued load; returns whether a load was queued.

        A load that has started is not cancelled.
        """
        self._waiting.leave(rid)
        return self.loads.cancel(rid)

    def forget(self, rid: str) -> None:
        """Forgets that a request waits; loads from lower tiers that have begun still land."""
        self._waiting.leave(rid)
        self.loads.forget(rid)

    def used(self, keys: Sequence[Key], times: int) -> None:
        """Records that ``keys``, which are also on the device, have been used ``times`` times.

        Keys that are not in host memory are ignored.
        """
        keys = self.host.present(keys)
        self._demotions.offer(keys, self.host.use(keys, times))

    def make_room(self, count: int) -> None:
        """Unpins pages kept for waiting requests until host memory has room for ``count`` pages.

        Makes room for a request that is being preempted. There may be less room in the end.
        """
        for give_up_one in self.keepers:
            while self.host.room < count and give_up_one():
                pass

    # --- progress and state -----------------------------------------------------------------------

    def poll(self) -> None:
        """Processes copies and lower-tier work that have ended, and starts the work that follows.

        The scheduler calls it at least once in each step.
        """
        self._copies.poll()
        self.stores.poll()
        self._waiting.advance()
        self._demotions.advance()

    @property
    def layout(self) -> Layout:
        """Layout of a page."""
        return self._copies.layout

    @property
    def enabled(self) -> bool:
        """True unless the tiers were disabled or closed."""
        return self.host.enabled

    @property
    def streams(self) -> Streams:
        """Streams of the device on which the KV pool is used."""
        return self._copies.streams

    @property
    def in_flight(self) -> BlocksInFlight:
        """Blocks of the device that copies read or write."""
        return self._copies.in_flight

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
        self.loads.clear()
        self.stores.clear()
        self.host.clear()

    def disable(self, reason: str) -> None:
        """Disables the tiers: no page is found or stored any more. Logs ``reason``."""
        if self.enabled:
            logger.warning("the tiers are disabled from now on: %s", reason)
            # Copies in progress are not cancelled: SGLang expects a result for each.
            self._waiting.leave_all()
            self.host.disable()

    def close(self) -> None:
        """Clears and closes the stack and all tiers."""
        self.clear()
        self.host.disable()
        for tier in self.lower:
            tier.close()
        for close in self._closing:
            close()

    def check_integrity(self) -> None:
        """Checks host memory, waiting requests, demotions, loads and stores. O(capacity).

        Raises:
            AssertionError: one of them contradicts itself, or host memory has fewer pins or
                reservations than they own.
        """
        for part in (self._waiting, self._demotions, self.loads, self.stores):
            part.check_integrity()
        self.host.check_integrity(
            [
                *self._waiting.pinned, *self._demotions.pinned, *self.loads.pinned,
                *self.stores.pinned,
            ],
            [*self._waiting.reserved, *self.stores.reserved],
        )  # fmt: skip
