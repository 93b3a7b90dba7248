"""Ticket of the transfer engine."""

from __future__ import annotations

import time

from sgl_ext._native import _transfer
from sgl_ext.memory.tickets import Priority, State, TransferCancelledError, TransferError


class NativeTicket:
    """Ticket of the transfer engine. A finished ticket keeps no memory or file alive."""

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
        return self._native.seconds

    @property
    def error(self) -> TransferError | None:
        """Error of a failed ticket; None in any other state."""
        failure = self._native.failure
        if failure is None:
            return None
        code, op, message = failure
        return TransferError(code, f"copy {op}: {message}", op, self.bytes_done)

    def poll(self) -> bool:
        return self._native.state != State.PENDING

    def wait(self, timeout: float) -> None:
        """Waits for the batch; see :meth:`Ticket.wait`."""
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

    def fence(self, stream: int | None, timeout: float) -> None:
        """Makes a CUDA stream wait for the batch; see :meth:`Ticket.fence`."""
        give_up = time.monotonic() + timeout
        if stream is None or not self._engine.fence(self._native, stream, timeout):
            self.wait(max(give_up - time.monotonic(), 0.0))

    def cancel(self) -> bool:
        """Cancels what has not started; see :meth:`Ticket.cancel`."""
        return self._engine.cancel(self._native)

    def __repr__(self) -> str:
        return (
            f"Ticket({self.state.name}, {self.priority.name}, "
            f"{self.bytes_done} of {self.bytes_total} bytes)"
        )
