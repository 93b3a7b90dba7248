"""Transfers of a tier: their totals, and whether the tier hangs or should be tried again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_ext.clock import Clock

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
    """Progress of the loads of one tier, which runs one load at a time.

    :meth:`begin` and :meth:`end` are called by the thread that loads, :meth:`worthwhile` by any.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = -math.inf
        self._ended = -math.inf
        self._late_at: float | None = None
        """Time after which the load in progress counts as hung; None if there is none."""

    def begin(self, expected: float) -> None:
        """Records the start of a load that is expected to take ``expected`` seconds."""
        self._began = self._clock()
        self._late_at = self._began + _HANGS_S + 2 * expected

    def end(self) -> float:
        """Records the end of the load, and returns its seconds."""
        self._late_at = None
        self._ended = self._clock()
        return self._ended - self._began

    def worthwhile(self, *, faster: bool) -> bool:
        """Returns whether to load from the tier.

        False while a load hangs. A slow tier is tried again :data:`_RETRY_S` after its last load:
        its device may have been busy.

        Args:
            faster: whether loading is expected to be faster than computing.
        """
        now, late_at = self._clock(), self._late_at  # read once: another thread changes it
        if late_at is not None and now > late_at:
            return False  # a new lookup or load would wait for that load
        return faster or now - self._ended > _RETRY_S
