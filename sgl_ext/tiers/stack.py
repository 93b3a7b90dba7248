"""Tier stack: host memory, the lower tiers, and the copies between them and the device."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.slab import Layout
from sgl_ext.memory.streams import Streams
from sgl_ext.planning.costs import Costs
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.demotion import Demotions
from sgl_ext.tiers.holds import Holds
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.layer_loads import LayerLoads
from sgl_ext.tiers.loads import Loads
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.stores import Stores

logger = logging.getLogger(__name__)


class Wake(Protocol):
    """Event that wakes the scheduler, such as a ``threading.Event``."""

    def wait(self, timeout: float) -> object:
        """Sleeps until the event is set, at most ``timeout`` seconds."""

    def clear(self) -> None:
        """Resets the event."""


class TierStack:
    """Interface of the tiers to the scheduler.

    Not thread-safe: only the scheduler's thread calls it. Of it, its loads, stores and holds only
    :meth:`Loads.finish`, :meth:`Holds.fill`, :meth:`clear` and :meth:`close` wait for a device;
    :meth:`wait` sleeps. Where a slot of host memory is taken whose KV is still being copied to the
    device, that copy is awaited (:meth:`HostPages.reserve`).

    Args:
        lower: Lower tiers, the nearest first.
        costs: Cost model of the scheduler.
        wake: Set by the threads of lower tiers when they have finished something.
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
        wake: Wake,
        closing: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.host = host
        self.lower = lower
        self.hits: Counter[str] = Counter()
        """Pages that requests loaded, by the name of the tier that had them."""
        self.missed = 0
        """Pages that admitted requests computed after looking them up."""
        for tier in lower:
            costs.open(tier.tier.name)
        self._copies = copies
        self._wake = wake
        self._closing = closing
        self.keepers: list[Callable[[], bool]] = []
        """Functions that unpin the pages kept for one waiting request; each returns False if it
        keeps no pages."""
        self._demotions = Demotions(lower, host, copies.layout.block_bytes, costs)
        self.loads = Loads(host, copies, layers, self.hits, costs.decisions)
        self.stores = Stores(host, copies, self._demotions)
        self.holds = Holds(host, copies, self._demotions, self.hits)

    # --- requests ---------------------------------------------------------------------------------

    def load(
        self,
        rid: str,
        keys: Sequence[Key],
        blocks: Pages,
        landed: Mapping[str, int],
        seconds: float,
    ) -> None:
        """Queues a load of ``keys``, all in host memory, into ``blocks`` for :meth:`Loads.start`.

        Args:
            landed: Pages of ``keys`` that came from each lower tier for this request, by its name.
            seconds: Seconds that they took.
        """
        self._demotions.offer(keys, self.loads.queue(rid, keys, blocks, landed, seconds))

    def used(self, keys: Sequence[Key], times: int) -> None:
        """Records that ``keys``, which are also on the device, have been used ``times`` times.

        Keys that are not in host memory are ignored.
        """
        keys = self.host.present(keys)
        self._demotions.offer(keys, self.host.use(keys, times))

    def keep(self, keys: Sequence[Key]) -> None:
        """Stores those of ``keys`` that are in host memory in all lower tiers, however often they
        were used before: they will be used again."""
        keys = self.host.present(keys)
        self._demotions.offer(keys, self.host.use(keys, 1), always=True)

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

    def wait(self, timeout: float) -> None:
        """Sleeps until a thread of a lower tier has finished something, ``timeout`` s at most."""
        self._wake.wait(timeout)
        self._wake.clear()

    def clear(self) -> None:
        """Cancels queued loads and removes the unpinned pages from host memory.

        Cancels stores, and waits until no load or store accesses the device.

        Raises:
            TimeoutError: A load is still in progress.
        """
        self.loads.clear()
        self.stores.clear()
        self.host.clear()

    def disable(self, reason: str) -> None:
        """Disables the tiers: no page is found or stored any more. Logs ``reason``."""
        if self.enabled:
            logger.warning("the tiers are disabled from now on: %s", reason)
            # Copies in progress are not cancelled: SGLang expects a result for each.
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
        """Checks host memory, demotions, loads and stores. O(capacity).

        Raises:
            AssertionError: one of them contradicts itself, or host memory has fewer pins or
                reservations than they own.
        """
        for part in (self._demotions, self.loads, self.stores):
            part.check_integrity()
        self.host.check_integrity(
            [*self._demotions.pinned, *self.loads.pinned, *self.stores.pinned],
            self.stores.reserved,
        )
