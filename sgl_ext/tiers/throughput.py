"""Throughput of transfers, and the decision whether loads from a tier are worthwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_ext.clock import Clock

_MEMORY = 0.8
"""Weight of the previous estimate in an exponential moving average."""
_RETRY_S = 30.0
"""Seconds after the last load at which a tier that is slower than computing is tried again."""
_HANGS_S = 10.0
"""Seconds beyond twice the expected time after which a load in progress counts as hung."""


@dataclass
class Traffic:
    """Pages that were moved in one direction, and the seconds spent on it."""

    pages: int = 0
    seconds: float = 0.0

    def add(self, pages: int, seconds: float) -> None:
        """Adds one transfer."""
        self.pages += pages
        self.seconds += seconds


class LoadThroughput:
    """Throughput of the loads of one tier, which runs one load at a time.

    :meth:`begin` and :meth:`end` are called by the thread that loads, :meth:`worthwhile` by any.
    """

    def __init__(self, clock: Clock) -> None:
        self.pages_per_second: float | None = None
        """Moving average over loads; None before the first."""
        self._clock = clock
        self._began = -math.inf
        self._ended = -math.inf
        self._late_at: float | None = None
        """Time after which the load in progress counts as hung; None if there is none."""

    def begin(self, pages: int) -> None:
        """Records the start of a load of ``pages`` pages."""
        self._began = self._clock()
        expected = pages / self.pages_per_second if self.pages_per_second else 0.0
        self._late_at = self._began + _HANGS_S + 2 * expected

    def end(self, landed: int) -> float:
        """Records the end of the load, of which ``landed`` pages arrived; returns its seconds."""
        self._late_at = None
        self._ended = self._clock()
        seconds = self._ended - self._began
        if landed:  # a failed load says nothing about throughput
            self.pages_per_second = running_rate(self.pages_per_second, landed / max(seconds, 1e-6))
        return seconds

    def worthwhile(self, computed_pages_per_second: float | None) -> bool:
        """Returns whether loading is expected to be faster than computing.

        True as long as one of the rates is unknown. False while a load hangs. A slow tier is tried
        again :data:`_RETRY_S` after its last load: its device may have been busy.
        """
        now, late_at = self._clock(), self._late_at  # read once: another thread changes it
        if late_at is not None and now > late_at:
            return False  # a new lookup or load would wait for that load
        if self.pages_per_second is None or computed_pages_per_second is None:
            return True
        long_ago = now - self._ended > _RETRY_S
        return long_ago or self.pages_per_second > computed_pages_per_second


def running_rate(before: float | None, now: float) -> float:
    """Returns the moving average after the measurement ``now``; ``before`` is None at the first."""
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now
