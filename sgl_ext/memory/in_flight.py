"""Blocks that a transfer still reads or writes: who is given one waits for it (FastSwitch §3.2)."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]


class Transfer(Protocol):
    """What :class:`~sgl_ext.memory.tickets.Ticket` is to this module."""

    def poll(self) -> bool:
        """Whether it is over: it touches nothing any more."""

    def wait(self, timeout: float) -> None:
        """Returns when it is done.

        Raises:
            TimeoutError: it is not over.
            Exception: it failed or was cancelled, and is over.
        """


class BlocksInFlight:
    """The last transfer that touches each block.

    A block may be given to its next owner while a transfer reads it: nothing is written into it
    before :meth:`wait` has returned. Not thread-safe.

    Args:
        blocks: how many there can be; they are numbered from 0.
    """

    def __init__(self, blocks: int) -> None:
        self._last = np.zeros(blocks, np.int64)
        """Number of the last transfer of each block; 0 for none."""
        self._transfers: dict[int, tuple[Transfer, ...]] = {}
        """With those before it that touch some of its blocks: they may end later."""
        self._order: deque[int] = deque()
        self._begun = 0
        self.waited = 0
        """How often somebody had to wait."""
        self.waited_seconds = 0.0

    def begin(self, blocks: Blocks, transfer: Transfer) -> None:
        """``transfer`` touches ``blocks`` until it is over."""
        self._settle()
        earlier = self._touching(blocks)
        self._begun += 1
        self._last[blocks] = self._begun
        self._transfers[self._begun] = (transfer, *earlier)
        self._order.append(self._begun)

    def wait(self, blocks: Blocks, timeout: float) -> None:
        """Returns when no transfer touches ``blocks``.

        Raises:
            TimeoutError: one still does after ``timeout`` seconds.
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
                _outwait(one, max(give_up - time.monotonic(), 0.0))
        finally:
            self.waited_seconds += time.monotonic() - began

    @property
    def pending(self) -> int:
        """Transfers that are not over."""
        self._settle()
        return len(self._transfers)

    def _touching(self, blocks: Blocks) -> list[Transfer]:
        """Those that are not over, each once."""
        numbers = set(self._last[blocks].tolist()) & self._transfers.keys()
        found = {one: None for number in numbers for one in self._transfers[number]}
        return [one for one in found if not one.poll()]

    def _settle(self) -> None:
        """Forgets what is over, as far as it ended in the order of its beginning."""
        while self._order and all(one.poll() for one in self._transfers[self._order[0]]):
            del self._transfers[self._order.popleft()]


def _outwait(transfer: Transfer, timeout: float) -> None:
    try:
        transfer.wait(timeout)
    except Exception:
        if not transfer.poll():  # too slow; one that failed touches nothing any more
            raise
