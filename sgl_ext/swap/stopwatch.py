"""What the scheduler's thread spends on something, without what that waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs within :meth:`on`, but not within an :meth:`off` inside it. Not thread-safe."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        if self._since is not None:  # it runs for somebody who called this one
            yield
            return
        self._since = time.perf_counter()
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
            self._since = time.perf_counter()

    def _stop(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None
