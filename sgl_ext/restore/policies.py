"""Whose KV the channel of a tier loads next, and whose prompt is computed next (CacheFlow §3.3)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A request as a policy sees it; seconds."""

    arrived: float
    remaining: float
    """Until its prompt is computed, if computing and channel are its own."""
    recomputing: float
    """Of computing what is not loaded."""
    rank: tuple[int, float]
    """What comes before any policy, and what :meth:`Policy.rank` last said."""


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses among requests that are being restored.

    Attributes:
        interrupts: whether a prompt that is being computed gives way to one of a smaller rank.
    """

    interrupts: bool

    def rank(self, one: Candidate) -> float:
        """The smaller, the sooner its prompt is computed. Asked for anew when the request's
        figures change, not for every choice."""

    def load(self, able: Collection[C], computing: C | None) -> C:
        """Whose KV is loaded next.

        Args:
            able: those that have something left to load; one at least.
            computing: the request whose prompt is being computed, which may have nothing left.
        """


def soonest(waiting: Collection[C]) -> C:
    """The one of the smallest rank."""
    return min(waiting, key=_RANK)


_RANK = attrgetter("rank")


class Shortest:
    """The least remaining time first, computing and channel on the same request.

    Waiting counts against remaining time, so that no request waits for ever: a request goes before
    all that arrive ``remaining / ageing`` seconds later or more.

    Args:
        ageing: seconds of remaining time that a second of waiting is worth.
    """

    interrupts = True

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def rank(self, one: Candidate) -> float:
        # All grow older at the same rate, so that the order of their ages is that of arrivals.
        return one.remaining + self._ageing * one.arrived

    def load(self, able: Collection[C], computing: C | None) -> C:
        if computing is not None and computing in able:
            return computing
        return soonest(able)


class Longest:
    """The channel goes to the largest remaining recomputation (Algorithm 1, line 7)."""

    interrupts = False

    def rank(self, one: Candidate) -> float:
        return one.arrived

    def load(self, able: Collection[C], computing: C | None) -> C:  # noqa: ARG002
        return max(able, key=attrgetter("recomputing"))


class Cake:
    """First come, first served, by computing and by the channel: two pointers for each request
    (Jin et al., ICML 2025)."""

    interrupts = False

    def rank(self, one: Candidate) -> float:
        return one.arrived

    def load(self, able: Collection[C], computing: C | None) -> C:  # noqa: ARG002
        return soonest(able)


POLICIES: dict[str, Callable[[float], Policy]] = {
    "shortest": Shortest,
    "longest": lambda _ageing: Longest(),
    "cake": lambda _ageing: Cake(),
}
"""By name, given ``ageing``."""
