"""A transfer engine whose copies happen when the test's dice say so, in any order, or fail."""

from __future__ import annotations

import random
from typing import Any

from sgl_ext.memory.tickets import Priority, State, Ticket, TransferCancelledError, TransferError
from sgl_ext.memory.transfer import TransferEngine


class DelayedTicket:
    """What :class:`Ticket` is to its owner."""

    seconds = 1e-6

    def __init__(self, engine: DelayedEngine, arguments: tuple[Any, ...]) -> None:
        self._engine = engine
        self._arguments = arguments
        self._real: Ticket | None = None
        self._state = State.PENDING
        self.bytes_total = 1

    @property
    def state(self) -> State:
        return self._state if self._real is None else self._real.state

    @property
    def urgent(self) -> bool:
        return self._arguments[2] == Priority.URGENT

    def poll(self) -> bool:
        return self.state != State.PENDING

    def wait(self, timeout: float) -> None:
        while self.state == State.PENDING:
            self._engine.let_happen(1)
        if self._state == State.FAILED:
            raise TransferError(5, "the dice say so", 0, 0)
        if self._state == State.CANCELLED:
            raise TransferCancelledError("cancelled")

    def cancel(self) -> bool:
        """By the dice it has begun: then it goes on."""
        if waiting := self.state == State.PENDING and self._engine.dice.random() < 0.5:
            self._engine.pending.remove(self)
            self._state = State.CANCELLED
        return waiting

    def happen(self, *, well: bool) -> None:
        if not well:
            self._state = State.FAILED
            return
        self._real = self._engine.real.submit(*self._arguments)
        self._real.wait(60)


class DelayedEngine:
    """Args:
    failing: how many of 100 copies from the device fail.

    Attributes:
        real: which carries them out.
    """

    real: TransferEngine

    def __init__(self, chance: random.Random, failing: int = 0) -> None:
        self.pending: list[DelayedTicket] = []
        self.dice = chance
        self._failing = failing

    def submit(self, *arguments: Any) -> DelayedTicket:
        ticket = DelayedTicket(self, arguments)
        self.pending.append(ticket)
        return ticket

    def let_happen(self, count: int) -> None:
        """So many of the pending copies, if there are as many."""
        for _ in range(min(count, len(self.pending))):
            ticket = self.pending.pop(self.dice.randrange(len(self.pending)))
            spared = ticket.urgent or self.dice.randrange(100) >= self._failing
            ticket.happen(well=spared)
