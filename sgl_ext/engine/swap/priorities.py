"""Application of a fairness policy: its levels become the priorities that SGLang uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

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

LEAST, MOST = -(1 << 31), (1 << 31) - 1
"""Bounds of given priorities. Levels, which ageing raises, must fit into 64 bits in SGLang's tree.
"""
_UNSET = {None, -sys.maxsize - 1}
"""Values of SGLang for requests that were submitted without a priority, where the larger one is
preferred."""
_CANDIDATE = "_sgl_ext_candidate"
"""Attribute of SGLang's ``Req``: its :class:`Candidate`."""


def priorities_of(config: Swap) -> Priorities | None:
    """Returns the priorities by the configured policy; None if the policy is SGLang's own."""
    policies: dict[str, Callable[[], Policy]] = {
        "fcfs": FirstCome,
        "static": lambda: Static(config.ageing),
        "round-robin": lambda: RoundRobin(config.quantum),
        "token-counter": lambda: TokenCounter(config.quantum),
    }
    experiment = config.experiment
    make = policies.get(config.policy)
    if (trace := experiment.trace) is not None:
        return Priorities(lambda: Trace(trace, config.quantum, experiment.seed))
    return None if make is None else Priorities(make)


class Priorities:
    """Priorities of a scheduler's requests, which a policy sets.

    Args:
        make: constructor of the policy.
    """

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self.clear()

    def clear(self) -> None:
        """Creates the policy anew and forgets all requests: a workload that is repeated gets the
        same trace."""
        self._policy = self._make()
        self._known: dict[str, Candidate] = {}
        self._forwards = -1

    def step(self, waiting: Iterable[Req], running: Iterable[Req], forwards: int) -> None:
        """Lets the policy set the levels of SGLang's requests, and makes them their priorities.

        Args:
            waiting: waiting requests.
            running: running requests.
            forwards: forwards so far. Without a further one, the policy counts no further iteration
                unless there is a new request.
        """
        present: dict[str, tuple[Req, Candidate]] = {}
        for runs, reqs in ((False, waiting), (True, running)):
            for req in reqs:
                one = getattr(req, _CANDIDATE, None)
                if one is None or one.name != req.rid:  # copied from another request
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

    def ended(self, one: Candidate) -> None:
        """Tells the policy that a request has ended."""
        self._policy.ended(one)

    def give(self, rid: str, priority: int) -> bool:
        """Gives a request another priority; returns False if the policy has not seen it."""
        if (one := self._known.get(rid)) is None:
            return False
        one.given = priority
        return True


def given(req: Req) -> int:
    """Returns the priority that a request was submitted with or given since, within the bounds; 0
    without one."""
    if (one := getattr(req, _CANDIDATE, None)) is not None:
        return int(one.given)
    return 0 if req.priority in _UNSET else min(max(int(req.priority), LEAST), MOST)


def ended(priorities: Priorities | None, req: Req) -> None:
    """Tells the policy that a request has ended, with all that it has generated."""
    one = getattr(req, _CANDIDATE, None)
    if priorities is not None and one is not None and one.name == req.rid and req.finished():
        one.generated = len(req.output_ids)
        priorities.ended(one)


def give_to(req: Req, priority: int) -> None:
    """Gives SGLang's request another priority, whether or not a policy has seen the request."""
    req.priority = priority
    if (one := getattr(req, _CANDIDATE, None)) is not None:
        one.given = priority


@contextmanager
def as_given(reqs: Collection[Req]) -> Iterator[None]:
    """Sets the given priorities of SGLang's requests, not a policy's levels, within the context."""
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


def _count(original: Original, kind: type, reqs: Collection[Req], *args: object) -> object:
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
        "SGLang creates a metric series per priority, and a policy has many levels",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._abort_on_queued_limit",
        "around",
        _full,
        "SGLang compares the priority that a new request was given with the policy's levels of "
        "waiting requests",
    ),
)
