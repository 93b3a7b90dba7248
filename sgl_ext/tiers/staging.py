"""Pages on their way from lower tiers into host memory, for the requests that wait for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, result_of
from sgl_ext.tiers.tier import leading


@dataclass
class _Part:
    """Consecutive pages that one tier loads."""

    tier: LowerTier
    keys: Sequence[Key]
    pages: Pages
    landed: Future[NDArray[np.bool_]]


class Staging:
    """What lower tiers have of a prompt behind the pages that host memory has of it.

    Every tier is asked what it has. The nearest one loads that, the next one what follows. What
    has landed is published in host memory up to the first gap. All of the prompt's pages that are
    there stay until :meth:`abandon`.

    Args:
        keys: of the prompt's pages.
        here: how many of them, from the first on, host memory has.
        spare: places of host memory that it leaves to others.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        here: int,
        host: HostPages,
        tiers: Sequence[LowerTier],
        *,
        spare: int = 0,
    ) -> None:
        self.keys = keys[here:]
        self.done = False
        self.landed: dict[str, int] = {}
        """Pages that each tier has brought, by its name."""
        self.seconds = 0.0
        """From the look-up on until they were there."""
        self._spare = spare
        self._began = time.monotonic()
        self._lookups = [(tier, tier.lookup(self.keys)) for tier in tiers]
        self._parts: list[_Part] | None = None
        self._abandoned = False
        self.short_of_room = False
        """Whether it waits for places in host memory."""
        self._pinned = host.places(keys[:here])
        host.pin(self._pinned)

    @property
    def keeps(self) -> bool:
        """Whether pages stay in host memory because of it."""
        return len(self._pinned) > 0

    def advance(self, host: HostPages) -> bool:
        """Takes the next step if it can be taken without waiting; whether it did."""
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
        """The request has its pages, or is gone; what is on its way lands nevertheless."""
        self._abandoned = True
        for part in self._parts or ():
            part.landed.cancel()  # what a busy tier has not begun, nobody waits for
        host.unpin(self._pinned)
        self._pinned = self._pinned[:0]

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
        # Its own pages are no reason to leave others more.
        most = max(host.room + len(self._pinned) - self._spare, 0)
        pages = host.reserve(min(at, host.room, most))
        self.short_of_room = pages is None or not len(pages)
        if pages is None or not len(pages):
            return False  # others hold the room; it comes back
        host.refuse(at - len(pages))
        self._parts = []
        for tier, begin, end in spans:
            keys, places = self.keys[begin:end], pages[begin:end]
            if len(places):
                keys = keys[: len(places)]
                self._parts.append(_Part(tier, keys, places, tier.load(keys, places)))
        return True

    def _publish(self, host: HostPages) -> None:
        whole = True  # what lies behind a gap is of no use
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
        self.seconds = time.monotonic() - self._began
        self.done = True
