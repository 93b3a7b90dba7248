"""Stopwatch for the time that the scheduler's thread spends on a task, without its waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_ext.clock import Clock


class Stopwatch:
    """Stopwatch that runs within :meth:`on`, except within a nested :meth:`off`. Not thread-safe.

    Args:
        waited: returns the seconds of waits that are counted elsewhere; they are subtracted.
        clock: clock that the stopwatch reads.
    """

    def __init__(self, waited: Callable[[], float], clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.seconds = 0.0
        self._waited = waited
        self._since: float | None = None
        """Start on the clock without waits, in seconds; None while the stopwatch is stopped."""

    @contextmanager
    def on(self) -> Iterator[None]:
        if self._since is not None:  # a caller has already started it
            yield
            return
        self._since = self._now()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def off(self) -> Iterator[None]:
        if self._since is None:
            yield
            return
        self._stop()
        try:
            yield
        finally:
            self._since = self._now()

    def _stop(self) -> None:
        if self._since is not None:
            self.seconds += self._now() - self._since
            self._since = None

    def _now(self) -> float:
        return self._clock() - self._waited()
