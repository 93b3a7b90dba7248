"""Metrics of ``/metrics`` whose values somebody else keeps."""

from __future__ import annotations

import time

from prometheus_client import Counter

_INTERVAL_S = 1.0


class Paced:
    """What is brought up to date once in a while."""

    _next = 0.0

    @property
    def due(self) -> bool:
        """Whether the last update is a while ago."""
        return time.monotonic() >= self._next

    def _updated(self) -> None:
        self._next = time.monotonic() + _INTERVAL_S


class Totals:
    """Raises counters to totals; a total that fell, because its owner began anew, counts for
    nothing."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, ...], float] = {}

    def set(self, counter: Counter, total: float, *labels: str) -> None:
        """Adds to the counter what the total has grown by."""
        key = (str(counter), *labels)
        counter.labels(*labels).inc(max(total - self._counted.get(key, 0.0), 0.0))
        self._counted[key] = total
