"""Record of blocks that a transfer still reads or writes (FastSwitch §3.2).

A request that is given such a block waits for the transfer.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]


class Transfer(Protocol):
    """A transfer, such as a :class:`~sgl_ext.memory.tickets.Ticket`."""

    def poll(self) -> bool:
        """Returns whether the transfer has finished, so that it touches no block any more."""

    def wait(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds until the transfer is done.

        Raises:
            TimeoutError: the transfer has not finished.
            Exception: the transfer has finished: it failed or was cancelled.
        """

    def fence(self, stream: int | None, timeout: float) -> None:
        """Makes a CUDA stream wait for the transfer; see :meth:`Ticket.fence`."""


class Together(tuple[Transfer, ...]):
    """Several transfers as one."""

    def poll(self) -> bool:
        return all(one.poll() for one in self)

    def wait(self, timeout: float) -> None:
        self.fence(None, timeout)

    def fence(self, stream: int | None, timeout: float) -> None:
        give_up = time.monotonic() + timeout
        for one in self:
            _outlast(one, stream, max(give_up - time.monotonic(), 0.0))


class BlocksInFlight:
    """Record of the last transfer that touches each block.

    A block may be given to its next owner while a transfer reads it. The owner must not write into
    it before :meth:`wait` has returned; its work on a CUDA stream need only be submitted after
    :meth:`fence`. Not thread-safe.

    Args:
        blocks: largest number of blocks; they are numbered from 0.
    """

    def __init__(self, blocks: int) -> None:
        self._last = np.zeros(blocks, np.int64)
        """Number of the last transfer of each block; 0 for none; int64 ``[blocks]``"""
        self._transfers: dict[int, tuple[Transfer, ...]] = {}
        """Each transfer by its number, with earlier ones on its blocks, which may finish later"""
        self._order: deque[int] = deque()
        self._begun = 0
        self.waited = 0
        """Number of calls of :meth:`wait` and :meth:`fence` that found an unfinished transfer"""
        self.waited_seconds = 0.0
        """Total time of these calls, in seconds"""

    def begin(self, blocks: Blocks, transfer: Transfer) -> None:
        """Records that ``transfer`` touches ``blocks`` until it has finished."""
        self._settle()
        earlier = self._touching(blocks)
        self._begun += 1
        self._last[blocks] = self._begun
        self._transfers[self._begun] = (transfer, *earlier)
        self._order.append(self._begun)

    def wait(self, blocks: Blocks, timeout: float) -> None:
        """Waits until no transfer touches ``blocks``.

        Raises:
            TimeoutError: a transfer still touches them after ``timeout`` seconds.
        """
        self.fence(blocks, None, timeout)

    def fence(self, blocks: Blocks, stream: int | None, timeout: float) -> None:
        """Makes work that is submitted to a CUDA stream from now on wait for the same.

        Args:
            stream: handle of the stream; None waits on the host.

        Raises:
            TimeoutError: as for :meth:`wait`, or copies were not even dispatched.
        """
        self._settle()
        if not self._transfers:
            return
        give_up = time.monotonic() + timeout
        if not (unfinished := self._touching(blocks)):
            return
        began = time.monotonic()
        self.waited += 1
        try:
            for one in unfinished:
                _outlast(one, stream, max(give_up - time.monotonic(), 0.0))
        finally:
            self.waited_seconds += time.monotonic() - began

    @property
    def pending(self) -> int:
        """Number of recorded transfers; a finished one counts until all earlier ones finish."""
        self._settle()
        return len(self._transfers)

    def _touching(self, blocks: Blocks) -> list[Transfer]:
        """Returns the unfinished transfers that touch ``blocks``, each once."""
        numbers = set(self._last[blocks].tolist()) & self._transfers.keys()
        found = {one: None for number in numbers for one in self._transfers[number]}
        return [one for one in found if not one.poll()]

    def _settle(self) -> None:
        """Forgets finished transfers in the order they began, up to the first unfinished one."""
        while self._order and all(one.poll() for one in self._transfers[self._order[0]]):
            del self._transfers[self._order.popleft()]


def _outlast(transfer: Transfer, stream: int | None, timeout: float) -> None:
    try:
        transfer.fence(stream, timeout)
    except Exception:
        if not transfer.poll():  # a failed transfer touches no block any more
            raise
