"""Policies that choose the next request to load and the next to compute (CacheFlow §3.3)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """Request as a policy sees it; all times are in seconds."""

    arrived: float
    remaining: float
    """Time until its prompt is computed if computing and channel serve only this request."""
    recomputing: float
    """Time of computing what is not loaded."""
    rank: tuple[int, float]
    """Precedence, which goes before any policy, and the last result of :meth:`Policy.rank`."""


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Policy that chooses among the requests that are being restored.

    Attributes:
        interrupts: True if a request of a smaller rank interrupts a prompt that is being computed.
    """

    interrupts: bool

    def rank(self, one: Candidate) -> float:
        """Returns the rank of a request; prompts with a smaller rank are computed sooner.

        Called when the request's estimates change, not for every choice.
        """

    def load(self, able: Collection[C], computing: C | None) -> C:
        """Returns the request whose KV is loaded next.

        Args:
            able: requests with pages left to load, at least one.
            computing: request whose prompt is being computed; it may have no pages left to load.
        """


def soonest(waiting: Collection[C]) -> C:
    """Returns the request with the smallest rank."""
    return min(waiting, key=_RANK)


_RANK = attrgetter("rank")


class Shortest:
    """Shortest remaining time first, with computing and channel on the same request.

    Waiting counts against remaining time, which prevents starvation: a request goes before all
    requests that arrive ``remaining / ageing`` seconds later or more.

    Args:
        ageing: seconds by which each second of waiting lowers the remaining time.
    """

    interrupts = True

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def rank(self, one: Candidate) -> float:
        # All requests age at the same rate, so arrival times give the same order as ages.
        return one.remaining + self._ageing * one.arrived

    def load(self, able: Collection[C], computing: C | None) -> C:
        if computing is not None and computing in able:
            return computing
        return soonest(able)


class Longest:
    """Largest remaining recomputation first for the channel (Algorithm 1, line 7).

    Prompts are computed first come, first served.
    """

    interrupts = False

    def rank(self, one: Candidate) -> float:
        return one.arrived

    def load(self, able: Collection[C], computing: C | None) -> C:  # noqa: ARG002
        return max(able, key=attrgetter("recomputing"))


class Cake:
    """First come, first served, for computing and for the channel: two pointers for each request
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
"""Constructors of the policies by name; their argument is ``ageing``."""
