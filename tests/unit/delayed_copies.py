"""Transfer engine for tests whose copies are late, run in a random order, or fail."""

from __future__ import annotations

import random
from typing import Any

from sgl_ext.memory.tickets import Priority, State, Ticket, TransferCancelledError, TransferError
from sgl_ext.memory.transfer import TransferEngine


class DelayedTicket:
    """Ticket of a delayed copy, with the part of :class:`Ticket` that its owner uses."""

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

    def fence(self, stream: int | None, timeout: float) -> None:
        self.wait(timeout)

    def cancel(self) -> bool:
        """Cancels a pending copy with probability 1/2; otherwise it counts as begun and goes on.

        Returns whether the copy was cancelled.
        """
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
    """Transfer engine that keeps submitted copies pending until the test lets them run.

    Args:
        chance: source of all random choices.
        failing: percentage of copies that fail; urgent copies (loads into the device) never do.

    Attributes:
        real: engine that performs the copies.
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
        """Runs ``count`` of the pending copies, chosen at random; all if there are fewer."""
        for _ in range(min(count, len(self.pending))):
            ticket = self.pending.pop(self.dice.randrange(len(self.pending)))
            spared = ticket.urgent or self.dice.randrange(100) >= self._failing
            ticket.happen(well=spared)
