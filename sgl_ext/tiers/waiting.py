"""Requests that wait for pages from lower tiers, or for admission with pages that have landed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_ext.clock import Clock
from sgl_ext.planning.costs import Costs
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.staging import Staging

_LEASE_S = 60.0
"""Seconds that pages are kept for a request after its last lookup."""


@dataclass
class _Request:
    staging: Staging
    owner: bool
    """True if the staging belongs to this request; otherwise it waits for another request's."""
    deadline: float | None
    """Monotonic time until which the request is held back; None before it is first considered for
    admission."""
    seen: float
    """Monotonic time of the last lookup."""


class Waiting:
    """Waiting requests, and the :class:`Staging` that each one waits for.

    Args:
        lower: Lower tiers, the nearest first.
        wait: Seconds that a request is held back, at most.
        costs: Cost model, which decides which tiers a request waits for.
        page: Tokens of a page.
        spare: Slots of host memory that loads leave free for others.
        clock: Clock of deadlines and leases.
    """

    def __init__(
        self,
        host: HostPages,
        lower: Sequence[LowerTier],
        wait: float,
        *,
        costs: Costs,
        page: int,
        clock: Clock,
        spare: int = 0,
    ) -> None:
        self._costs = costs
        self._page = page
        self._clock = clock
        self._host = host
        self._lower = lower
        self._wait = wait
        self._spare = spare
        self._requests: dict[str, _Request] = {}
        self._deadlines: dict[str, float] = {}
        """Deadlines of requests whose pages were given up, by request."""
        self._stagings: list[Staging] = []

    def ask(self, rid: str, keys: Sequence[Key], here: int, begin: int) -> None:
        """Starts to load the request's ``keys`` after the first ``here`` from lower tiers.

        If a staging of another request begins with the same page, the request waits for that one;
        the next call after it has ended loads what is still missing. A call for a request that
        already waits only renews its lease.

        Args:
            here: Number of leading keys in host memory.
            begin: Position of the first of ``keys`` in the prompt, in pages.
        """
        request = self._requests.get(rid)
        if request is not None and request.staging.done and not request.owner:
            del self._requests[rid]  # the other request's staging may not cover all of its pages
            request = None
        now = self._clock()
        if request is not None:
            request.seen = now
        elif self._lower and here < len(keys):
            staging = self._same(keys[here])
            owner = staging is None
            staging = staging or self._begin(keys, here, begin)
            self._requests[rid] = _Request(staging, owner, self._deadlines.pop(rid, None), now)

    def ready(self, rid: str) -> bool:
        """Returns whether the request need not be held back for its pages.

        True if it does not wait, its staging has ended or its deadline has passed. Call it when the
        request is considered for admission: the first call sets the deadline.
        """
        request = self._requests.get(rid)
        if request is None or request.staging.done:
            return True
        now = self._clock()
        if request.deadline is None:
            request.deadline = now + self._wait
        return now > request.deadline

    def leave(self, rid: str) -> Staging | None:
        """Removes a request, and returns its staging; None if it has none of its own.

        Abandons the staging, so its pages are unpinned. Loads that have begun still land.
        """
        self._deadlines.pop(rid, None)
        request = self._requests.pop(rid, None)
        if request is None or not request.owner:
            return None
        request.staging.abandon(self._host)
        return request.staging

    def give_up_one(self) -> bool:
        """Unpins the pages kept for one request; returns False if there is no such request.

        Chooses the newest request that was not considered for admission yet, otherwise the newest
        one. The request keeps its deadline if it is looked up again.
        """
        keeping = [rid for rid, each in self._requests.items() if each.owner and each.staging.keeps]
        if not keeping:
            return False
        early = [rid for rid in keeping if self._requests[rid].deadline is None]
        rid = (early or keeping)[-1]
        deadline = self._requests[rid].deadline
        self.leave(rid)
        if deadline is not None:
            self._deadlines[rid] = deadline
        return True

    def leave_all(self) -> None:
        """Removes all requests."""
        for rid in list(self._requests):
            self.leave(rid)

    def advance(self) -> None:
        """Takes every step that needs no waiting, and removes requests whose lease has expired."""
        for staging in self._stagings:
            while staging.advance(self._host):
                pass
            if staging.short_of_room:
                break  # later stagings must not take the room first
        self._stagings = [staging for staging in self._stagings if not staging.done]
        now = self._clock()
        for rid in [rid for rid, each in self._requests.items() if now > each.seen + _LEASE_S]:
            self.leave(rid)

    def pending(self) -> bool:
        """Returns whether a request waits for a lower tier."""
        return any(not request.staging.done for request in self._requests.values())

    @property
    def pinned(self) -> list[Pages]:
        """Pages that are pinned for the requests."""
        return [each.staging.pinned for each in self._requests.values() if each.owner]

    @property
    def reserved(self) -> list[Pages]:
        """Slots of host memory that loads in progress write to."""
        return [pages for staging in self._stagings for pages in staging.reserved]

    def check_integrity(self) -> None:
        """Checks the requests against the loads that they wait for. O(pages).

        Raises:
            AssertionError: two requests own one load, a load in progress has been forgotten, or a
                request has a second deadline.
        """
        owned = [id(each.staging) for each in self._requests.values() if each.owner]
        if len({*owned}) < len(owned):
            raise AssertionError("two requests own one load")
        here = {id(staging) for staging in self._stagings}
        for rid, each in self._requests.items():
            if not each.staging.done and id(each.staging) not in here:
                raise AssertionError(f"{rid} waits for a load that nothing advances")
        for staging in self._stagings:
            staging.check_integrity()
        if twice := self._requests.keys() & self._deadlines.keys():
            raise AssertionError(f"{twice} have two deadlines")

    def _same(self, key: Key) -> Staging | None:
        """Returns the staging in progress whose first page is ``key``; None if there is none."""
        return next((other for other in self._stagings if other.keys[0] == key), None)

    def _begin(self, keys: Sequence[Key], here: int, begin: int) -> Staging:
        tokens, first = (len(keys) - here) * self._page, (begin + here) * self._page
        tiers = [
            tier for tier in self._lower
            if tier.throughput.worthwhile(
                faster=self._costs.worth_loading(tier.tier.name, tokens, first)
            )
        ]  # fmt: skip
        staging = Staging(keys, here, self._host, tiers, spare=self._spare, clock=self._clock)
        while staging.advance(self._host):
            pass
        if not staging.done:
            self._stagings.append(staging)
        return staging
