"""Durations of the copies in one direction of the link between device and host memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sgl_ext.clock import Clock
from sgl_ext.memory.tickets import State, Ticket
from sgl_ext.planning.costs import Costs

_KEPT = 256
"""Copies in progress whose durations are awaited; the oldest ones are forgotten."""


class _Copy(NamedTuple):
    began: float
    tokens: int
    tickets: Sequence[Ticket]


class CopyTimes:
    """Copies in progress, whose durations are recorded in the cost model when they have ended.

    A lane carries copies out one after another, so the time that a copy waits for the one before it
    does not count. Of a copy that is cancelled in part, what has landed is recorded; a copy that
    fails is not.

    Args:
        channel: name of the direction in the cost model.
        clock: clock of the start of copies; tickets tell how long they took.
    """

    def __init__(self, costs: Costs, channel: str, clock: Clock) -> None:
        self._costs = costs
        self._channel = channel
        self._clock = clock
        self._copies: deque[_Copy] = deque(maxlen=_KEPT)
        self._free = -math.inf
        """Time at which the last recorded copy ended."""

    def begin(self, tokens: int, tickets: Sequence[Ticket]) -> None:
        """Records the start of a copy of some tokens, with a ticket for each of its parts."""
        self._copies.append(_Copy(self._clock(), tokens, tickets))

    def poll(self) -> None:
        """Records the copies that have ended, in their order."""
        while self._copies and all(ticket.poll() for ticket in self._copies[0].tickets):
            began, tokens, tickets = self._copies.popleft()
            landed = [ticket.seconds for ticket in tickets if ticket.state == State.DONE]
            ended = began + max((ticket.seconds for ticket in tickets), default=0.0)
            seconds = began + max(landed, default=0.0) - max(began, self._free)
            self._free = max(self._free, ended)
            failed = any(ticket.state == State.FAILED for ticket in tickets)
            if seconds > 0 and landed and not failed:
                self._costs.loaded(self._channel, tokens * len(landed) // len(tickets), seconds)
