"""Holds: pages of host memory that another power pins, and copies from them to the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sgl_ext.clock import Clock
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Priority, Ticket
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.demotion import Demotions
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.part_loads import Pace, PartLoads


class Holds:
    """Pinned pages of host memory, which their owner unpins, and copies from them.

    Args:
        hits: Pages that requests loaded, by the name of the tier that had them; counted here.
    """

    def __init__(
        self,
        host: HostPages,
        copies: DeviceCopies,
        demotions: Demotions,
        hits: Counter[str],
    ) -> None:
        self._host = host
        self._copies = copies
        self._demotions = demotions
        self._hits = hits

    def hold(self, keys: Sequence[Key]) -> Pages:
        """Pins the leading ``keys`` that are in host memory until :meth:`let_go`.

        It does not count as a use: a request that waits may be looked up many times.

        Returns:
            The slots of these pages; empty if the tiers are disabled.
        """
        pages = self._host.use(keys[: self._host.lookup(keys)], times=1)
        self._host.pin(pages)
        return pages

    def used(self, keys: Sequence[Key], loaded: int | None = None) -> None:
        """Counts that a request uses pages, which are pinned.

        Args:
            loaded: number of these pages that it loaded; None for all.
        """
        self._hits["host"] += len(keys) if loaded is None else loaded
        self._demotions.offer(keys, self._host.use(keys))

    def let_go(self, pages: Pages) -> None:
        """Unpins ``pages``."""
        self._host.unpin(pages)

    def reserve(self, count: int) -> Pages | None:
        """Returns reserved slots for pages that a lower tier loads; None if there is no room."""
        return self._host.reserve(count)

    def release(self, pages: Pages) -> None:
        """Frees reserved slots."""
        self._host.release(pages)

    def loaded(self, tier: str, pages: int) -> None:
        """Counts pages that a request has loaded from a lower tier."""
        self._hits[tier] += pages

    def parts_into(
        self,
        pages: Pages,
        blocks: Pages,
        parts: Sequence[tuple[int, int]],
        pace: Pace,
        clock: Clock,
    ) -> PartLoads:
        """Returns loads of a lower tier into reserved ``pages``, and from there into ``blocks``."""

        def copy(layers: tuple[int, int]) -> Ticket:
            return self._copies.load_layers(pages, blocks, layers)

        def fence(ticket: Ticket) -> None:
            ticket.fence(self._copies.streams.current(), COPY_DEADLINE_S)

        return PartLoads(parts, copy, fence, pace, clock)

    def fill(self, pages: Pages, blocks: Pages) -> None:
        """Copies pinned ``pages`` into ``blocks`` of the device before the calling thread's next
        work on the device.

        The pages may be unpinned as soon as it returns.

        Raises:
            TimeoutError: The copy is still in progress; the blocks must not be read.
            TransferError: The copy failed; the blocks must not be read.
            TransferCancelledError: The engine was closed; the blocks must not be read.
        """
        self.begin_fill(pages, blocks).fence(self._copies.streams.current(), COPY_DEADLINE_S)

    def fill_tokens(self, places: Pages, slots: Pages) -> None:
        """Copies tokens of pinned pages to ``slots`` of the device, like :meth:`fill`.

        Args:
            places: See :meth:`~sgl_ext.tiers.copies.DeviceCopies.fill_tokens`.
        """
        ticket = self._copies.fill_tokens(places, slots)
        ticket.fence(self._copies.streams.current(), COPY_DEADLINE_S)

    def begin_fill(
        self, pages: Pages, blocks: Pages, priority: Priority = Priority.URGENT
    ) -> Ticket:
        """Starts to copy pinned ``pages`` into ``blocks`` of the device.

        Args:
            priority: Below urgent for copies that may still be cancelled: a CUDA lane dispatches
                urgent ones at once.
        """
        return self._copies.fill(pages, blocks, priority)

    def fill_from_the_top(self, pages: Pages, blocks: Pages) -> list[Ticket]:
        """Starts to copy pinned ``pages`` into ``blocks`` of the device, the last layer first.

        Returns:
            One ticket for each layer; the index is the layer's number.
        """
        return self._copies.load_from_the_top(pages, blocks)

    def check_integrity(self, pinned: Iterable[Pages], reserved: Iterable[Pages] = ()) -> None:
        """Checks that ``pinned``, which are held at the same time, are pinned. O(pages).

        Args:
            reserved: reserved slots.

        Raises:
            AssertionError: host memory has fewer pins, or a reserved slot is free or has a page.
        """
        self._host.check_integrity(pinned, reserved)

    def addresses(self, pages: Pages) -> Pages:
        """Returns the address of the first byte of each of ``pages``."""
        return self._copies.addresses(pages)
