"""Whether a swap-in is waited for, or goes on while others decode (FastSwitch §3.2)."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_REMEMBERED = 32
"""Iterations and swap-ins of late."""


class Adaptive:
    """Chooses what costs fewer tokens, by what was seen lately.

    While the scheduler waits, all that run lose what they would have generated. While it does not,
    the request that comes back loses every iteration that begins before its KV is there. So a short
    swap-in is waited for, the more readily the fewer run.
    """

    def __init__(self) -> None:
        self._iterations: deque[float] = deque(maxlen=_REMEMBERED)
        self._per_byte: deque[float] = deque(maxlen=_REMEMBERED)

    def iterated(self, seconds: float) -> None:
        """A decode step took so long."""
        self._iterations.append(seconds)

    def swapped(self, size: int, seconds: float) -> None:
        """A swap-in of ``size`` bytes took so long."""
        self._per_byte.append(seconds / max(size, 1))

    def waits(self, size: int, running: int) -> bool:
        """Whether the scheduler waits for a swap-in.

        Args:
            size: its bytes.
            running: requests that would generate meanwhile.
        """
        if not (running and self._per_byte and self._iterations):
            return True  # and learns from it
        iterations = size * median(self._per_byte) / max(median(self._iterations), 1e-9)
        return iterations * running <= math.ceil(iterations)
