"""Tickets of submitted batches of copies: their priority, state and result.

:class:`~sgl_ext.memory.native_ticket.NativeTicket` is that of the transfer engine; a
simulator has its own.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from typing import Protocol

from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)

COPY_DEADLINE_S = 60.0
"""Deadline of a copy within this machine's memory, in seconds; a slower copy counts as stuck"""


class Priority(IntEnum):
    """Priority of a ticket within a lane."""

    BULK = 0
    NORMAL = 1
    URGENT = 2


class State(IntEnum):
    """State of a ticket."""

    PENDING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3


class TransferError(OSError):
    """Error raised when a copy fails.

    ``errno`` is the kernel's, or on a CUDA lane the error number of the CUDA runtime. ENODATA means
    that a file ended before the requested bytes.
    """

    def __init__(self, code: int, message: str, op: int, bytes_done: int) -> None:
        super().__init__(code, message)
        self.op = op
        """Index of the copy in its batch"""
        self.bytes_done = bytes_done
        """Bytes of the whole batch that were transferred"""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errno, self.strerror, self.op, self.bytes_done)


class TransferCancelledError(ExtError):
    """Error raised when a ticket was cancelled, by its owner or because the engine closed."""


class Ticket(Protocol):
    """One submitted batch of copies, as those who wait for it see it."""

    @property
    def state(self) -> State: ...

    @property
    def error(self) -> TransferError | None:
        """Error of a failed ticket; None in any other state."""

    @property
    def bytes_total(self) -> int: ...

    @property
    def bytes_done(self) -> int:
        """Bytes transferred so far; final once the ticket is finished."""

    @property
    def seconds(self) -> float:
        """Time from submission to the end of the ticket, in seconds; 0 while it is unfinished."""

    def poll(self) -> bool:
        """Returns whether the ticket is finished: done, failed or cancelled."""

    def wait(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds until the batch is done.

        Raises:
            TransferError: a copy failed; the other copies may or may not have been carried out.
            TransferCancelledError: the ticket was cancelled.
            TimeoutError: the ticket is not finished; its copies continue.
        """

    def fence(self, stream: int | None, timeout: float) -> None:
        """Makes work that is submitted to a CUDA stream from now on wait until the batch is done.

        Waits on the host, at most ``timeout`` seconds, only until the copies are dispatched. If the
        copies are not those of a CUDA lane, or ``stream`` is None, it waits until the batch is
        done.

        Args:
            stream: handle of the stream (``torch.cuda.Stream.cuda_stream``).

        Raises:
            TransferError, TransferCancelledError, TimeoutError: as for :meth:`wait`. A copy that
                fails after it was dispatched breaks the CUDA context.
        """

    def cancel(self) -> bool:
        """Cancels the pieces that have not started; returns False if all had started.

        The ticket is finished when its pieces in flight are finished. Until then its memory is in
        use.
        """


def outlast(ticket: Ticket) -> None:
    """Waits without a time limit until ``ticket`` is finished, whatever its outcome.

    Logs an error whenever :data:`COPY_DEADLINE_S` passes.
    """
    while not ticket.poll():
        try:
            ticket.wait(COPY_DEADLINE_S)
        except TimeoutError:
            logger.error("a copy has not finished after %s s: %r", COPY_DEADLINE_S, ticket)
        except Exception as error:  # the ticket's state keeps the outcome
            logger.debug("a copy failed: %s", error)
