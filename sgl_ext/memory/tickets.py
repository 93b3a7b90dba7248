"""What a submitted batch of copies is to its owner: urgency, state, result."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import IntEnum

from sgl_ext._native import _transfer
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)

COPY_DEADLINE_S = 60.0
"""Of copies within this machine's memory: one that takes longer never ends."""


class Priority(IntEnum):
    """Levels of urgency within a lane."""

    BULK = 0
    NORMAL = 1
    URGENT = 2


class State(IntEnum):
    """What became of a ticket."""

    PENDING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3


class TransferError(OSError):
    """A copy failed. ``errno`` is the kernel's, or on a CUDA lane the runtime's error number.

    ENODATA stands for a file that ended before the bytes that were asked for.
    """

    def __init__(self, code: int, message: str, op: int, bytes_done: int) -> None:
        super().__init__(code, message)
        self.op = op
        """Index of the copy in its batch."""
        self.bytes_done = bytes_done
        """Bytes of the whole batch that were transferred."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror, self.op, self.bytes_done)


class TransferCancelledError(ExtError):
    """The ticket was cancelled, by its owner or because the engine closed."""


class Ticket:
    """One submitted batch. It keeps nothing alive once it is finished."""

    __slots__ = ("_engine", "_native")

    def __init__(self, native: _transfer.Ticket, engine: _transfer.Engine) -> None:
        self._native = native
        self._engine = engine

    @property
    def state(self) -> State:
        return State(self._native.state)

    @property
    def priority(self) -> Priority:
        return Priority(self._native.level)

    @property
    def bytes_total(self) -> int:
        return self._native.bytes_total

    @property
    def bytes_done(self) -> int:
        """Bytes transferred so far; final once the ticket is finished."""
        return self._native.bytes_done

    @property
    def seconds(self) -> float:
        """From submission until it was finished; 0 as long as it is not."""
        return self._native.seconds

    @property
    def error(self) -> TransferError | None:
        """Why the ticket failed, if it did."""
        failure = self._native.failure
        if failure is None:
            return None
        code, op, message = failure
        return TransferError(code, f"copy {op}: {message}", op, self.bytes_done)

    def poll(self) -> bool:
        """Whether the ticket is finished: done, failed or cancelled."""
        return self._native.state != State.PENDING

    def wait(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds for the batch to be done.

        Raises:
            TransferError: a copy failed; the others may or may not have been carried out.
            TransferCancelledError: the ticket was cancelled.
            TimeoutError: it is not finished yet, and goes on.
        """
        if not self._engine.wait(self._native, timeout):
            raise TimeoutError(
                f"{self.bytes_done} of {self.bytes_total} bytes were transferred in {timeout} s; "
                "wait again, or cancel the ticket"
            )
        if error := self.error:
            raise error
        if self.state == State.CANCELLED:
            raise TransferCancelledError(
                f"the transfer was cancelled after {self.bytes_done} of {self.bytes_total} bytes"
            )

    def cancel(self) -> bool:
        """Cancels the pieces that have not started; False if all had.

        The ticket is finished once the pieces in flight are; until then its memory is in use.
        """
        return self._engine.cancel(self._native)

    def __repr__(self) -> str:
        return (
            f"Ticket({self.state.name}, {self.priority.name}, "
            f"{self.bytes_done} of {self.bytes_total} bytes)"
        )


def outlast(ticket: Ticket) -> None:
    """Returns when ``ticket`` is finished, however it ended and however long that takes."""
    while not ticket.poll():
        try:
            ticket.wait(COPY_DEADLINE_S)
        except TimeoutError:
            logger.error("a copy has not ended for %s s: %r", COPY_DEADLINE_S, ticket)
        except Exception as error:  # who looks at its state knows
            logger.debug("a copy: %s", error)


def poll(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Those of ``tickets`` that are finished."""
    return [ticket for ticket in tickets if ticket.poll()]
