"""From a fairness policy's levels to the priorities that SGLang schedules and preempts by."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sgl_ext.config import Swap
from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import Req, Scheduler
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
_CANDIDATE = "_sgl_ext_candidate"
"""Attribute of SGLang's ``Req``: its :class:`Candidate`."""


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

    def step(self, waiting: Iterable[Req], running: Iterable[Any], forwards: int) -> None:
        """An iteration may begin with these requests of SGLang's.

        Args:
            forwards: that were run so far; without a further one it is no further iteration,
                unless somebody has come.
        """
        present: dict[str, tuple[Any, Candidate]] = {}
        for runs, reqs in ((False, waiting), (True, running)):
            for req in reqs:
                one = getattr(req, _CANDIDATE, None)
                if one is None or one.name != req.rid:  # a copy of another request
                    prompt = len(req.origin_input_ids)
                    one = Candidate(req.rid, req.cache_salt, given(req), prompt)
                    setattr(req, _CANDIDATE, one)
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


def given(req: Req) -> int:
    """The priority that SGLang's request was submitted with, or was given since; 0 without one."""
    if (one := getattr(req, _CANDIDATE, None)) is not None:
        return int(one.given)
    return 0 if req.priority in _UNSET else int(req.priority)


def give_to(req: Req, priority: int) -> None:
    """SGLang's request has that priority from now on, whether or not a policy has seen it."""
    req.priority = priority
    if (one := getattr(req, _CANDIDATE, None)) is not None:
        one.given = priority


@contextmanager
def as_given(reqs: Collection[Req]) -> Iterator[None]:
    """Has SGLang's requests bear the priorities that they were given, not a policy's levels."""
    levels = [(req, req.priority) for req in reqs]
    for req in reqs:
        req.priority = given(req)
    try:
        yield
    finally:
        for req, level in levels:
            req.priority = level


def _priorities() -> Priorities | None:
    swap = None if runtime.current is None else runtime.current.swap
    return None if swap is None else swap.priorities


def _count(original: Original, kind: type, reqs: Collection[Req], *args: object) -> Any:
    if _priorities() is None:
        return original(kind, reqs, *args)
    with as_given(reqs):
        return original(kind, reqs, *args)


def _full(original: Original, scheduler: Scheduler, req: Req) -> bool:
    if _priorities() is None:
        return original(scheduler, req)
    with as_given([*scheduler.waiting_queue, req]):
        return original(scheduler, req)


HOOKS = (
    hooks.Hook(
        "sglang.srt.observability.metrics_collector.QueueCount.from_reqs",
        "around",
        _count,
        "SGLang makes a series of each priority, and a policy's levels are many",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._abort_on_queued_limit",
        "around",
        _full,
        "SGLang compares what a new request was given with a policy's levels of those that wait",
    ),
)
