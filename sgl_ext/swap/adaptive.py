"""Choice between waiting for a swap-in and overlapping it with decode (FastSwitch §3.2)."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_REMEMBERED = 32
"""Recent iterations and swap-ins that are kept."""


class Adaptive:
    """Policy that chooses what costs fewer tokens, based on recent measurements.

    While the scheduler waits, every running request loses the tokens that it would have generated.
    While it does not wait, the resumed request loses every iteration that begins before its KV is
    loaded. The policy therefore waits for short swap-ins only, and for longer ones if few run.
    """

    def __init__(self) -> None:
        self._iterations: deque[float] = deque(maxlen=_REMEMBERED)
        self._per_byte: deque[float] = deque(maxlen=_REMEMBERED)

    def iterated(self, seconds: float) -> None:
        """Records the duration of a decode step."""
        self._iterations.append(seconds)

    def swapped(self, size: int, seconds: float) -> None:
        """Records the duration of a swap-in of ``size`` bytes."""
        self._per_byte.append(seconds / max(size, 1))

    def waits(self, size: int, running: int) -> bool:
        """Returns whether the scheduler should wait for a swap-in.

        Args:
            size: bytes of the swap-in.
            running: requests that would decode meanwhile.
        """
        if not (running and self._per_byte and self._iterations):
            return True  # nothing else runs, or nothing is measured yet
        iterations = size * median(self._per_byte) / max(median(self._iterations), 1e-9)
        return iterations * running <= math.ceil(iterations)
