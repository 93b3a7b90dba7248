"""Staging: loads from lower tiers into host memory for requests that wait for their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clock import Clock
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, Pending, result_of
from sgl_ext.tiers.tier import leading


@dataclass
class _Part:
    """Consecutive pages that one tier loads."""

    tier: LowerTier
    keys: Sequence[Key]
    pages: Pages
    landed: Pending[NDArray[np.bool_]]


class Staging:
    """Load of one prompt's pages from lower tiers, after the leading pages in host memory.

    All tiers look up the pages. The nearest tier loads the pages that it holds, and the next tier
    the pages that follow. Landed pages are published in host memory up to the first gap. The
    prompt's pages in host memory are pinned until :meth:`abandon`.

    Args:
        keys: Keys of the prompt's pages.
        here: Number of leading pages that are in host memory.
        tiers: Lower tiers, the nearest first.
        spare: Slots of host memory to leave free for others.
        clock: Clock of the duration of the load.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        here: int,
        host: HostPages,
        tiers: Sequence[LowerTier],
        *,
        clock: Clock,
        spare: int = 0,
    ) -> None:
        self._clock = clock
        self.keys = keys[here:]
        self.done = False
        self.landed: dict[str, int] = {}
        """Pages loaded from each tier, by the tier's name."""
        self.seconds = 0.0
        """Seconds from the lookup until the pages were published; 0 before."""
        self._spare = spare
        self._began = self._clock()
        self._lookups = [(tier, tier.lookup(self.keys)) for tier in tiers]
        self._parts: list[_Part] | None = None
        self._abandoned = False
        self.short_of_room = False
        """True while the load waits for free slots in host memory."""
        self._pinned = host.places(keys[:here])
        host.pin(self._pinned)

    @property
    def keeps(self) -> bool:
        """True if it pins pages in host memory."""
        return len(self._pinned) > 0

    @property
    def pinned(self) -> Pages:
        """Pages that it pins in host memory."""
        return self._pinned

    @property
    def reserved(self) -> list[Pages]:
        """Slots of host memory that its loads write to."""
        return [] if self.done else [part.pages for part in self._parts or ()]

    def advance(self, host: HostPages) -> bool:
        """Takes the next step if that needs no waiting; returns whether a step was taken."""
        if self.done:
            return False
        if self._abandoned and self._parts is None:
            self.done = True
            return True
        if self._parts is None:
            return all(lookup.done() for _, lookup in self._lookups) and self._load(host)
        if not all(part.landed.done() for part in self._parts):
            return False
        self._publish(host)
        return True

    def abandon(self, host: HostPages) -> None:
        """Unpins the pages: the request has loaded them or does not need them any more.

        Loads that have begun still land and are published.
        """
        self._abandoned = True
        for part in self._parts or ():
            part.landed.cancel()  # succeeds only if the tier has not begun it
        host.unpin(self._pinned)
        self._pinned = self._pinned[:0]

    def check_integrity(self) -> None:
        """Checks the parts of the load against its keys. O(pages).

        Raises:
            AssertionError: tiers load other pages than the first ones in their order, more pages
                have landed than were loaded, or an abandoned load pins pages.
        """
        parts = self._parts or []
        loaded = [key for part in parts for key in part.keys]
        if loaded != [*self.keys[: len(loaded)]]:
            raise AssertionError("tiers load other pages than the first ones of the prompt")
        if any(len(part.pages) != len(part.keys) for part in parts):
            raise AssertionError("a tier loads pages into more or fewer slots")
        if sum(self.landed.values()) > len(loaded):
            raise AssertionError(f"{self.landed} have landed of {len(loaded)} loaded pages")
        if self._abandoned and self.keeps:
            raise AssertionError(f"an abandoned load pins {self._pinned}")

    def _load(self, host: HostPages) -> bool:
        spans, at = [], 0
        for tier, lookup in self._lookups:
            end = result_of(lookup, 0)
            if end > at:
                spans.append((tier, at, end))
                at = end
        if at == 0:
            self.done = True
            return True
        # The request's own pinned pages count towards the spare slots: it must not wait for itself.
        most = max(host.room + len(self._pinned) - self._spare, 0)
        pages = host.reserve(min(at, host.room, most))
        self.short_of_room = pages is None or not len(pages)
        if pages is None or not len(pages):
            return False  # other requests occupy the room; the next call tries again
        host.refuse(at - len(pages))
        self._parts = []
        for tier, begin, end in spans:
            keys, places = self.keys[begin:end], pages[begin:end]
            if len(places):
                keys = keys[: len(places)]
                self._parts.append(_Part(tier, keys, places, tier.load(keys, places)))
        return True

    def _publish(self, host: HostPages) -> None:
        whole = True  # pages after a gap are of no use
        for part in self._parts or ():
            good = leading(result_of(part.landed, np.zeros(len(part.keys), np.bool_)))
            good = good if whole else 0
            whole = good == len(part.keys)
            host.release(part.pages[good:])
            host.publish(part.keys[:good], part.pages[:good])
            self.landed[part.tier.tier.name] = good
        if not self._abandoned:
            landed = host.places(self.keys[: sum(self.landed.values())])
            host.pin(landed)
            self._pinned = np.concatenate((self._pinned, landed))
        self.seconds = self._clock() - self._began
        self.done = True
