"""From a fairness policy's levels to the priorities that SGLang schedules and preempts by."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from sgl_ext.config import Swap
from sgl_ext.swap.fairness import (
    Candidate,
    FirstCome,
    Policy,
    RoundRobin,
    Static,
    TokenCounter,
    Trace,
)

_UNSET = {None, sys.maxsize, -sys.maxsize - 1}
"""What SGLang gives requests that come without a priority."""


def priorities_of(config: Swap) -> Priorities | None:
    """By the policy that is configured; None if that is SGLang's own."""
    policies: dict[str, Callable[[], Policy]] = {
        "fcfs": FirstCome,
        "static": lambda: Static(config.ageing),
        "round-robin": lambda: RoundRobin(config.quantum),
        "token-counter": lambda: TokenCounter(config.quantum),
        "random": lambda: Trace("random", config.quantum, config.seed),
        "markov": lambda: Trace("markov", config.quantum, config.seed),
    }
    make = policies.get(config.policy)
    return None if make is None else Priorities(make)


class Priorities:
    """Of the requests of a scheduler."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self.clear()

    def clear(self) -> None:
        """Begins anew: a workload that is offered again finds the same trace."""
        self._policy = self._make()
        self._known: dict[str, Candidate] = {}
        self._forwards = -1

    def step(self, waiting: Iterable[Any], running: Iterable[Any], forwards: int) -> None:
        """An iteration may begin with these requests of SGLang's.

        Args:
            forwards: that were run so far; without a further one it is no further iteration,
                unless somebody has come.
        """
        present: dict[str, tuple[Any, Candidate]] = {}
        for runs, reqs in ((False, waiting), (True, running)):
            for req in reqs:
                if (one := self._known.get(req.rid)) is None:
                    given = 0 if req.priority in _UNSET else req.priority
                    prompt = len(req.origin_input_ids)
                    one = Candidate(req.rid, req.cache_salt, given, prompt)
                one.generated, one.running = len(req.output_ids), runs
                present[req.rid] = req, one
        if forwards != self._forwards or not present.keys() <= self._known.keys():
            self._forwards = forwards
            self._policy.step([one for _, one in present.values()])
        for req, one in present.values():
            req.priority = one.level
        self._known = {rid: one for rid, (_, one) in present.items()}

    def give(self, rid: str, priority: int) -> bool:
        """Whether there is such a request, which has that priority from now on."""
        if (one := self._known.get(rid)) is None:
            return False
        one.given = priority
        return True
