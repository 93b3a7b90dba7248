"""Requests that wait for lower tiers, or for their turn with what these have brought."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_ext.tiers.arena import Key
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.staging import Staging

_LEASE_S = 60.0
"""How long pages stay for a request that does not come back for them."""


@dataclass
class _Request:
    staging: Staging
    owner: bool
    """Whether the staging is this request's; if not, it waits for what another one asked for."""
    deadline: float | None
    """Until when it is held back; known from its first turn on."""
    seen: float


class Waiting:
    """Which requests are held back, and the :class:`Staging` that each one waits for.

    Args:
        lower: the nearest first.
        wait: seconds that a request is held back, at most.
        spare: places of host memory that pages on their way leave to others.
    """

    def __init__(
        self, host: HostPages, lower: Sequence[LowerTier], wait: float, *, spare: int = 0
    ) -> None:
        self._host = host
        self._lower = lower
        self._wait = wait
        self._spare = spare
        self._requests: dict[str, _Request] = {}
        self._deadlines: dict[str, float] = {}
        """Deadlines of requests that gave up the pages kept for them."""
        self._stagings: list[Staging] = []

    def ask(self, rid: str, keys: Sequence[Key], here: int, computed: float | None) -> None:
        """Host memory has ``here`` of the request's ``keys``: the others begin to come.

        Args:
            computed: pages that a second of computing is worth, if known.
        """
        request = self._requests.get(rid)
        if request is not None and request.staging.done and not request.owner:
            del self._requests[rid]  # what another request waited for is here: is it enough?
            request = None
        now = time.monotonic()
        if request is not None:
            request.seen = now
        elif self._lower and here < len(keys):
            staging = self._same(keys[here])
            owner = staging is None
            staging = staging or self._begin(keys, here, computed)
            self._requests[rid] = _Request(staging, owner, self._deadlines.pop(rid, None), now)

    def ready(self, rid: str) -> bool:
        """Whether no more pages will come for the request, or not in time.

        To be asked when it is the request's turn: from the first time on it waits.
        """
        request = self._requests.get(rid)
        if request is None or request.staging.done:
            return True
        now = time.monotonic()
        if request.deadline is None:
            request.deadline = now + self._wait
        return now > request.deadline

    def leave(self, rid: str) -> Staging | None:
        """The request waits no more; what was brought for it. What is on its way still lands."""
        self._deadlines.pop(rid, None)
        request = self._requests.pop(rid, None)
        if request is None or not request.owner:
            return None
        request.staging.abandon(self._host)
        return request.staging

    def give_up_one(self) -> bool:
        """Lets the pages be evicted that are kept for one of the requests: the newest one, those
        last that have had their turn. Looked up again, it is held back no longer than it would have
        been. False if there is none."""
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
        for rid in list(self._requests):
            self.leave(rid)

    def advance(self) -> None:
        """Takes every step that can be taken without waiting."""
        for staging in self._stagings:
            while staging.advance(self._host):
                pass
            if staging.short_of_room:
                break  # those behind it came later
        self._stagings = [staging for staging in self._stagings if not staging.done]
        now = time.monotonic()
        for rid in [rid for rid, each in self._requests.items() if now > each.seen + _LEASE_S]:
            self.leave(rid)

    def pending(self) -> bool:
        """Whether a request waits for a lower tier."""
        return any(not request.staging.done for request in self._requests.values())

    def _same(self, key: Key) -> Staging | None:
        """What is under way and begins with the same page."""
        return next((other for other in self._stagings if other.keys[0] == key), None)

    def _begin(self, keys: Sequence[Key], here: int, computed: float | None) -> Staging:
        tiers = [tier for tier in self._lower if tier.worthwhile(computed)]
        staging = Staging(keys, here, self._host, tiers, spare=self._spare)
        while staging.advance(self._host):
            pass
        if not staging.done:
            self._stagings.append(staging)
        return staging
