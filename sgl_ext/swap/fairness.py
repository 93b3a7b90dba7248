"""Fairness policies, which set the level of each request in each iteration.

A waiting request preempts running requests of a lower level. Requests of the same level do not
preempt each other and run in order of arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Literal, Protocol
from weakref import WeakKeyDictionary, WeakSet

import xxhash

Pattern = Literal["random", "markov"]

STAY = 0.8
"""Markov: probability that a served request stays preferred, and that another one does not become
preferred."""
_BITS = 20
_RESOLUTION = 1 << _BITS
"""Number of levels of a draw."""


@dataclass(eq=False)
class Candidate:
    """Running or waiting request.

    Attributes:
        name: id of the request.
        client: client that the request belongs to.
        given: priority that the request was submitted with or was given since; a larger one is
            more urgent.
        prompt: tokens of the prompt.
        generated: tokens generated so far.
        running: True if the request runs.
        level: level that a policy sets; requests with a larger one run sooner.
    """

    name: str
    client: Hashable = None
    given: int = 0
    prompt: int = 0
    generated: int = 0
    running: bool = False
    level: int = 0


class Policy(Protocol):
    """Fairness policy."""

    def step(self, present: Collection[Candidate]) -> None:
        """Sets the levels of the requests of the iteration that begins."""

    def ended(self, one: Candidate) -> None:
        """Is called when a request has ended; it may have run between two iterations only."""


class _Policy:
    """Policy to which it does not matter that a request has ended."""

    def ended(self, one: Candidate) -> None:
        """Does nothing."""


class FirstCome(_Policy):
    """First come, first served: the request that arrived last is preempted first."""

    def __init__(self) -> None:
        self._came = 0
        self._known: WeakSet[Candidate] = WeakSet()

    def step(self, present: Collection[Candidate]) -> None:
        for one in present:
            if one not in self._known:
                self._known.add(one)
                self._came += 1
                one.level = -self._came


class Static(_Policy):
    """Static priorities: levels follow the given priorities, with ageing against starvation.

    Args:
        ageing: iterations of waiting that raise a request by one level. Each raised level lasts for
            the same number of iterations of running.
    """

    def __init__(self, ageing: int) -> None:
        self._ageing = ageing
        self._aged: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Iterations of waiting minus iterations of running since, at least 0."""

    def step(self, present: Collection[Candidate]) -> None:
        for one in present:
            aged = self._aged.get(one, 0)
            self._aged[one] = aged = max(aged - 1, 0) if one.running else aged + 1
            # Rounded up for a running request: it is not preempted as soon as it is admitted.
            risen = -(-aged // self._ageing) if one.running else aged // self._ageing
            one.level = one.given + risen


class RoundRobin(_Policy):
    """Round robin: each request runs for a quantum in turn.

    Args:
        quantum: iterations of one turn.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._had: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Iterations that each request has run; a new one starts with the minimum of the others."""
        self._before: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Iterations that each request had run before its current turn."""

    def step(self, present: Collection[Candidate]) -> None:
        had, before = self._had, self._before
        least = min((had[one] for one in present if one in had), default=0)
        for one in present:
            had[one] = had[one] + one.running if one in had else least
            if not one.running:
                before[one] = had[one]
            # After its turn a request also ranks below requests that have run equally long.
            over = had[one] - before.setdefault(one, had[one]) >= self._quantum
            one.level = -had[one] - 1 if over else -before[one]


class TokenCounter:
    """Least served client first (virtual token counter: Sheng et al., OSDI 2024, Alg. 2).

    The counter of a client that returns is lifted to the minimum of the present clients, so that no
    client accumulates unused service.

    Args:
        quantum: difference in weighted tokens from which on one client preempts the other.
        prompt: weight of a prompt token.
        generated: weight of a generated token.
    """

    def __init__(self, quantum: int, prompt: int = 1, generated: int = 2) -> None:
        self._quantum = quantum
        self._prompt, self._generated = prompt, generated
        self._served: dict[Hashable, int] = {}
        self._there: set[Hashable] = set()
        self._charged: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Generated tokens of each request that are already counted."""

    def step(self, present: Collection[Candidate]) -> None:
        served, charged = self._served, self._charged
        there = {one.client for one in present}
        least = min((served[client] for client in there & self._there), default=None)
        for client in there - self._there:
            before = served.get(client, 0)
            served[client] = before if least is None else max(before, least)
        if least is not None:  # on return they would be lifted to it
            for client in [one for one in served if one not in there and served[one] <= least]:
                del served[client]
        self._there = there
        for one in present:
            if one.running or one in charged:
                self._charge(one)
        for one in present:
            one.level = -(served[one.client] // self._quantum)

    def ended(self, one: Candidate) -> None:
        self._charge(one)

    def _charge(self, one: Candidate) -> None:
        """Counts what a request has computed and generated since it was charged last."""
        served = self._served.get(one.client, 0)
        if (charged := self._charged.get(one)) is None:
            served, charged = served + self._prompt * one.prompt, 0
        self._served[one.client] = served + self._generated * (one.generated - charged)
        self._charged[one] = one.generated


class Trace(_Policy):
    """Priorities that change at a given rate, for measurements and tests (FastSwitch §4.2).

    The level that a request draws depends on its name, the update, the seed and, for ``markov``,
    on whether it was served. It does not depend on other requests.

    Args:
        pattern: ``random`` draws levels anew at each update. ``markov`` mostly keeps requests that
            were served since the last update before requests that were not.
        every: iterations between updates.
        seed: seed of the draws.
    """

    def __init__(self, pattern: Pattern, every: int, seed: int) -> None:
        self._markov = pattern == "markov"
        self._every = every
        self._seed = seed
        self._iteration = 0
        self._served: WeakKeyDictionary[Candidate, bool] = WeakKeyDictionary()
        """True for requests that were served since the last update."""

    def step(self, present: Collection[Candidate]) -> None:
        update, at = divmod(self._iteration, self._every)
        self._iteration += 1
        for one in present:
            served = one.running or self._served.get(one, False)
            if at == 0 or one not in self._served:
                one.level = self._draw(one.name, update, served=served)
                served = False
            self._served[one] = served

    def _draw(self, name: str, update: int, *, served: bool) -> int:
        drawn = xxhash.xxh3_64_intdigest(f"{self._seed}/{update}/{name}".encode())
        level, chance = drawn % _RESOLUTION, drawn // _RESOLUTION / (1 << 64 - _BITS)
        preferred = self._markov and chance < (STAY if served else 1 - STAY)
        return level + preferred * _RESOLUTION
