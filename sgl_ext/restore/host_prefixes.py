"""Prefixes that are restored within one forward (CacheFlow §3.1).

They are in host memory, or in a lower tier whose pages can be loaded by layers.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_ext.clock import Clock
from sgl_ext.planning.plan import Compute, LoadOrCompute, PrefillPlan, Span
from sgl_ext.planning.strategy import Strategy
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.holds import Holds
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.part_loads import PartLoads


@dataclass
class Held:
    """Consecutive pages of a prompt that are pinned in host memory, or have reserved places there
    that a lower tier loads them to."""

    first: int
    """Number of the first page in the prompt."""
    keys: Sequence[Key]
    """Keys of the pages."""
    pages: Pages
    """Places in host memory."""
    by: Strategy
    since: float
    """Time of pinning on the monotonic clock, in seconds."""
    computed: int = 0
    """Tokens that forwards have computed instead of loading them. By layers, the computed share of
    the layers times the tokens."""
    tier: LowerTier | None = None
    """Tier that has the pages; None if host memory has them."""
    loads: list[PartLoads] = field(default_factory=list)
    """Loads into the reserved places."""
    told: dict[str, Any] | None = None
    """Entry of the request's answer on this prefix, set when the last forward is admitted."""

    @property
    def source(self) -> str:
        """Name of the tier that has the pages."""
        return "host" if self.tier is None else self.tier.tier.name


class HostPrefixes:
    """Prefixes whose pages keep places in host memory until the forwards that load them have ended.

    Args:
        page: tokens of a page.
        clock: clock of the times of pinning.
    """

    def __init__(self, holds: Holds, page: int, clock: Clock) -> None:
        self._clock = clock
        self._holds = holds
        self._page = page
        self._held: dict[str, Held] = {}
        self._leaving: list[Held] = []
        """Released prefixes to whose places a tier still writes."""

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def __getitem__(self, rid: str) -> Held:
        return self._held[rid]

    def hold(self, rid: str, keys: Sequence[Key], first: int, by: Strategy) -> None:
        """Pins the request's next pages ``keys``, all of which are in host memory.

        Args:
            first: number of the first page in the prompt.
            by: strategy that restores them.
        """
        self.release(rid)
        pages = self._holds.hold(keys)
        self._held[rid] = Held(first, keys[: len(pages)], pages, by, self._clock())

    def hold_below(self, rid: str, keys: Sequence[Key], first: int, tier: LowerTier) -> bool:
        """Reserves places for the request's next pages ``keys``, which a tier loads by layers.

        Returns:
            False if host memory has no room for them.
        """
        self.release(rid)
        if (pages := self._holds.reserve(len(keys))) is None:
            return False
        since = self._clock()
        self._held[rid] = Held(first, keys, pages, Strategy.LAYERS, since, tier=tier)
        return True

    @property
    def loading(self) -> bool:
        """Returns whether a tier loads, or will, what forwards have asked for so far."""
        every = (*self._held.values(), *self._leaving)
        return any(not loads.closed for held in every for loads in held.loads)

    def used(self, rid: str) -> int:
        """Counts a use of the request's pages, and returns the tokens of them that were loaded."""
        held = self._held[rid]
        loaded = len(held.pages) * self._page - held.computed
        if held.tier is None:
            self._holds.used(held.keys, loaded // self._page)
        else:
            self._holds.loaded(held.tier.tier.name, loaded // self._page)
        return loaded

    def computed(self, rid: str, tokens: int) -> None:
        """Records that a forward has computed so many tokens of the request's pages."""
        self._held[rid].computed += tokens

    def plan(self, rid: str, end: int) -> PrefillPlan:
        """Returns the plan of the request's prompt of ``end`` tokens."""
        held = self._held[rid]
        begin, loaded = held.first * self._page, (held.first + len(held.pages)) * self._page
        spans = [Span(begin, loaded, LoadOrCompute()), Span(loaded, end, Compute())]
        return PrefillPlan([Span(0, begin, Compute()), *spans] if begin else spans)

    def release(self, rid: str) -> None:
        """Unpins the pages of a request whose prefill has ended or will not run.

        Reserved places to which a tier still writes are freed by a later call of :meth:`expire`.
        """
        if (held := self._held.pop(rid, None)) is None:
            return
        if held.tier is None:
            self._holds.let_go(held.pages)
        else:
            self._leaving.append(held)
            self._free()

    def _free(self) -> None:
        staying = []
        for held in self._leaving:
            if all(loads.closed for loads in held.loads):
                self._holds.release(held.pages)
            else:
                staying.append(held)
        self._leaving = staying

    def expire(self, since: float, kept: Container[str]) -> None:
        """Releases pages that were pinned before ``since``, except for the requests in ``kept``.

        The next lookup of a request pins its pages again.
        """
        self._free()
        for rid in [rid for rid, held in self._held.items() if held.since < since]:
            if rid not in kept:
                self.release(rid)

    def give_up_one(self, kept: Container[str]) -> bool:
        """Releases the pages of the newest request that is not in ``kept``.

        The next lookup of the request pins its pages again.

        Returns:
            False if there is no such request.
        """
        rid = next((rid for rid in reversed(self._held) if rid not in kept), None)
        if rid is not None:
            self.release(rid)
        return rid is not None

    def clear(self) -> list[str]:
        """Releases all pages and returns the ids of their requests."""
        rids = list(self._held)
        for rid in rids:
            self.release(rid)
        return rids

    @property
    def pinned(self) -> list[Pages]:
        """Pages that are pinned for each request."""
        return [held.pages for held in self._held.values() if held.tier is None]

    @property
    def reserved(self) -> list[Pages]:
        """Places that are reserved for loads of lower tiers."""
        return [held.pages for held in (*self._held.values(), *self._leaving) if held.tier]

    def check_integrity(self) -> None:
        """Checks the pins, and that no more tokens were computed than are held. O(pages).

        Raises:
            AssertionError: a request holds no pages or pages that are not pinned for it, or the
                count of its computed tokens is not within these pages.
        """
        self._holds.check_integrity(self.pinned, self.reserved)
        for rid, held in self._held.items():
            tokens = len(held.pages) * self._page
            if held.first < 0 or not 0 <= held.computed <= tokens or not tokens:
                raise AssertionError(f"{rid} holds {tokens} tokens, {held.computed} are computed")
