"""Sliding window over the recent needs of a worker."""

from __future__ import annotations

import math
from collections import deque


class NeedWindow:
    """Largest need of the last ``seconds`` seconds. Amortized O(1) per need.

    Raises:
        ValueError: ``seconds`` is not positive.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"the window must be positive, found {seconds} seconds")
        self.seconds = seconds
        # Times rise and needs fall: a need that a later one at least equals is not kept.
        self._largest: deque[tuple[float, int]] = deque()
        self._now = -math.inf

    def add(self, tokens: int, now: float) -> None:
        """Records a need of ``tokens`` at time ``now``, in seconds of any monotonic clock.

        Raises:
            ValueError: ``tokens`` is negative, or ``now`` is before that of an earlier call;
                nothing has changed.
        """
        if not tokens >= 0:
            raise ValueError(f"expected 0 or more tokens, found {tokens}")
        self._advance(now)
        while self._largest and self._largest[-1][1] <= tokens:
            self._largest.pop()
        self._largest.append((now, tokens))

    def largest(self, now: float) -> int:
        """Returns the largest need since ``now - seconds``, in tokens; 0 if there was none.

        Raises:
            ValueError: ``now`` is before that of an earlier call; nothing has changed.
        """
        self._advance(now)
        return self._largest[0][1] if self._largest else 0

    def _advance(self, now: float) -> None:
        if not now >= self._now:
            raise ValueError(f"time went from {self._now} to {now}; use one monotonic clock")
        self._now = now
        while self._largest and self._largest[0][0] < now - self.seconds:
            self._largest.popleft()
