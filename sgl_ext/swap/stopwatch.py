"""What the scheduler's thread spends on something, without what that waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs within :meth:`on`, but not within an :meth:`off` inside it. Not thread-safe.

    Args:
        waited: seconds that others have counted, which are waits, too.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._waited = waited
        self._since: float | None = None
        """In time that was not waited."""

    @contextmanager
    def on(self) -> Iterator[None]:
        if self._since is not None:  # it runs for somebody who called this one
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
        return time.perf_counter() - self._waited()
