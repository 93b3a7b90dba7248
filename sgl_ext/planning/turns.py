"""Turns: which of the requests that are being restored is computed next, one at a time."""

from __future__ import annotations

from collections.abc import Collection

from sgl_ext.clock import Clock
from sgl_ext.planning.channels import Channels, Restoration
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.deadlines import Deadlines
from sgl_ext.planning.policies import soonest
from sgl_ext.planning.request import Request
from sgl_ext.planning.want import Name
from sgl_ext.planning.wants import Wants

_SEEN_S = 5.0
"""Time for which a request that the scheduler no longer considers blocks others, in seconds."""


class Turns:
    """Order in which the prompts of wants are computed.

    The policy of the channels ranks the requests, so that both pointers serve the same one.

    Args:
        wait: seconds within which tiers have to answer a lookup.
        clock: clock of the scheduler's steps.
    """

    def __init__(
        self, wants: Wants, channels: Channels, costs: Costs, *, wait: float, clock: Clock
    ) -> None:
        self._wants = wants
        self._channels = channels
        self._costs = costs
        self._wait = wait
        self._clock = clock
        self._first: Restoration | None = None
        """Restoration that is computed next in this step, once chosen."""
        self._chosen = False
        self._now = clock()
        """Start of this step of the scheduler, on the clock in seconds."""
        self._before = self._now
        """Start of the previous step."""
        self._following = Deadlines(wait)
        """Deadlines of requests that wait for another want with the same pages."""
        self._unanswered = 0
        """Number of requests that were not held back for lookups any longer."""
        self.interrupted = 0
        """Number of times that a prompt being computed was interrupted."""

    @property
    def late(self) -> int:
        """Number of requests that were not held back any longer for lookups or another want."""
        return self._unanswered + self._following.late

    def turn(self, name: Name, *, continuing: bool) -> bool:
        """Returns whether a waiting request may be computed now.

        Releases a want whose lookups take too long or that gets no places in host memory; the
        scheduler may then compute it.

        Args:
            continuing: True if another prompt is being computed in parts.
        """
        wants = self._wants
        if (request := wants.requests.get(name)) is None:
            if wants.follows(name):
                return self._following.passed(name, self._now)
            self._following.forget(name)
            return True
        request.seen = self._now
        if (active := wants.opened.get(name)) is not None and self._chosen:
            return active is self._first and not continuing
        if active is None and not request.answered:
            if self._now < request.asked + self._wait:
                return False
            self._unanswered += 1
            self.release(name)
            return True
        if continuing or self._channels.computing is not None:
            return False
        if not self._chosen:
            self._choose()
        first = self._first
        if active is None and (first is None or request.want.precedence < first.precedence):
            # No request that holds places will release any, or it is less urgent and may have to
            # wait for memory: this one takes the places that are free, or loads nothing.
            if (active := wants.open(request, scarce=True)) is None:
                self.release(name)
                return True
            self._first = active
        return active is not None and self._first is active

    def _choose(self) -> None:
        """Chooses the request that is computed next, among those that the scheduler considers."""
        able: Collection[Restoration] = [
            one for one in self._wants.opened.values() if not one.whole
        ]
        first = soonest(able) if able else None
        if first is not None and not self._sees(first):  # rare: all requests are checked
            able = self._seen()
            first = soonest(able) if able else None
        self._first, self._chosen = first, True

    def _seen(self) -> list[Restoration]:
        return [one for one in self._wants.opened.values() if not one.whole and self._sees(one)]

    def _sees(self, one: Restoration) -> bool:
        """Returns whether the scheduler still considers the request."""
        # Counted from the previous step, because the last forward may have taken long.
        return self._wants.requests[one.name].seen > self._before - _SEEN_S

    def preferred(self) -> Name | None:
        """Returns the want whose request should interrupt the one whose prompt is being computed.

        Returns None if there is none, or if the gain in rank is not worth a change.
        """
        computing = self._channels.computing
        if computing is None or not self._channels.interrupts:
            return None
        others = [one for one in self._seen() if one is not computing]
        if not others:
            return None
        first = soonest(others)
        with self._channels.lock:
            for one in (first, computing):  # estimated costs may have changed
                self._channels.changed(one)
        begin = computing.reached
        # Estimates change from part to part; a margin keeps similar requests from alternating.
        worth = self._costs.compute.seconds(begin, begin + self._costs.chunk)
        (urgency, rank), (other_urgency, other_rank) = first.rank, computing.rank
        sooner = rank + worth < other_rank
        return first.name if (urgency, not sooner) < (other_urgency, True) else None

    def interrupt(self) -> None:
        """Interrupts the prompt that is being computed.

        Its loaded pages stay, and it continues when it is chosen again.
        """
        with self._channels.lock:
            self._channels.computing = None
        self.clear()
        self.interrupted += 1

    def release(self, name: Name) -> Request | None:
        """Ends a want; see :meth:`Wants.release`."""
        if self._first is not None and self._wants.opened.get(name) is self._first:
            self.clear()
        self._following.forget(name)
        return self._wants.release(name)

    def advance(self) -> None:
        """Begins a step of the scheduler."""
        self._before, self._now = self._now, self._clock()
        self._first, self._chosen = None, self._channels.computing is not None

    def clear(self) -> None:
        """Forgets the choice of this step."""
        self._first, self._chosen = None, False
