"""Updates of Prometheus metrics whose values are kept elsewhere."""

from __future__ import annotations

import time

from prometheus_client import Counter

_INTERVAL_S = 1.0


class Paced:
    """Base class of metrics that are updated at most once per second."""

    _next = 0.0

    @property
    def due(self) -> bool:
        """True if an update is due."""
        return time.monotonic() >= self._next

    def _updated(self) -> None:
        self._next = time.monotonic() + _INTERVAL_S


class Totals:
    """Counters that follow totals. A total that fell, because its owner restarted, adds nothing."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, ...], float] = {}

    def set(self, counter: Counter, total: float, *labels: str) -> None:
        """Adds the growth of the total since the last call to the counter."""
        key = (str(counter), *labels)
        counter.labels(*labels).inc(max(total - self._counted.get(key, 0.0), 0.0))
        self._counted[key] = total
