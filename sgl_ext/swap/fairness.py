"""Who runs where not all fit: policies that give each request a level, anew in each iteration.

A request that waits displaces those that run on a lower level than its own; on one level nobody
displaces anybody, and who came first runs first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Literal, Protocol
from weakref import WeakKeyDictionary, WeakSet

import xxhash

Pattern = Literal["random", "markov"]

STAY = 0.8
"""Markov: probability that who was served stays preferred, and who was not stays behind."""
_BITS = 20
_RESOLUTION = 1 << _BITS
"""Levels of a draw."""


@dataclass(eq=False)
class Candidate:
    """A request that runs or waits.

    Attributes:
        name: of the request.
        client: whose it is.
        given: the priority that it was submitted with, or was given since; the larger, the more
            urgent.
        prompt: tokens.
        generated: tokens, so far.
        running: whether it runs.
        level: the larger, the sooner it runs.
    """

    name: str
    client: Hashable = None
    given: int = 0
    prompt: int = 0
    generated: int = 0
    running: bool = False
    level: int = 0


class Policy(Protocol):
    """Sets levels."""

    def step(self, present: Collection[Candidate]) -> None:
        """An iteration begins with these requests."""


class FirstCome:
    """Who came last gives way."""

    def __init__(self) -> None:
        self._came = 0
        self._known: WeakSet[Candidate] = WeakSet()

    def step(self, present: Collection[Candidate]) -> None:
        for one in present:
            if one not in self._known:
                self._known.add(one)
                self._came += 1
                one.level = -self._came


class Static:
    """By the priorities that requests were given, aged so that nobody starves.

    Args:
        ageing: iterations of waiting that are worth one level. Who has risen keeps each level for
            as many iterations of running.
    """

    def __init__(self, ageing: int) -> None:
        self._ageing = ageing
        self._aged: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Iterations of waiting, less those of running since."""

    def step(self, present: Collection[Candidate]) -> None:
        for one in present:
            aged = self._aged.get(one, 0)
            self._aged[one] = aged = max(aged - 1, 0) if one.running else aged + 1
            # Rounded up for who runs: it is not displaced as soon as it has got its turn.
            risen = -(-aged // self._ageing) if one.running else aged // self._ageing
            one.level = one.given + risen


class RoundRobin:
    """Each in turn, for a quantum.

    Args:
        quantum: iterations.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._had: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Iterations of running."""
        self._before: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Those before its turn."""

    def step(self, present: Collection[Candidate]) -> None:
        had, before = self._had, self._before
        least = min((had[one] for one in present if one in had), default=0)
        for one in present:
            had[one] = had[one] + one.running if one in had else least
            if not one.running:
                before[one] = had[one]
            # Who has had its turn gives way to those that have had as much, too.
            over = had[one] - before.setdefault(one, had[one]) >= self._quantum
            one.level = -had[one] - 1 if over else -before[one]


class TokenCounter:
    """The client that was served least (virtual token counter: Sheng et al., OSDI 2024, Alg. 2).

    A client that comes back is lifted to the least of those that are there, so that nobody saves
    service up.

    Args:
        quantum: weighted tokens that clients may differ by before one displaces the other.
        prompt: weight of a token of a prompt.
        generated: weight of a generated one.
    """

    def __init__(self, quantum: int, prompt: int = 1, generated: int = 2) -> None:
        self._quantum = quantum
        self._prompt, self._generated = prompt, generated
        self._served: dict[Hashable, int] = {}
        self._there: set[Hashable] = set()
        self._charged: WeakKeyDictionary[Candidate, int] = WeakKeyDictionary()
        """Generated tokens that were counted."""

    def step(self, present: Collection[Candidate]) -> None:
        served, charged = self._served, self._charged
        there = {one.client for one in present}
        least = min((served[client] for client in there & self._there), default=None)
        for client in there - self._there:
            before = served.get(client, 0)
            served[client] = before if least is None else max(before, least)
        if least is not None:  # what others would be lifted to
            for client in [one for one in served if one not in there and served[one] <= least]:
                del served[client]
        self._there = there
        for one in present:
            if one not in charged:
                if not one.running:
                    continue
                served[one.client] += self._prompt * one.prompt
                charged[one] = 0
            served[one.client] += self._generated * (one.generated - charged[one])
            charged[one] = one.generated
        for one in present:
            one.level = -(served[one.client] // self._quantum)


class Trace:
    """Priorities that change at a given rate, to measure and test with (FastSwitch §4.2).

    What a request draws depends on its name, the update and the seed, not on who else is there.

    Args:
        pattern: ``random``: drawn anew at each update; ``markov``: such that who was served since
            the last one mostly stays before who was not.
        every: iterations between updates.
    """

    def __init__(self, pattern: Pattern, every: int, seed: int) -> None:
        self._markov = pattern == "markov"
        self._every = every
        self._seed = seed
        self._iteration = 0
        self._served: WeakKeyDictionary[Candidate, bool] = WeakKeyDictionary()
        """Since the last update."""

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
