"""Counters of ``/metrics`` whose totals somebody else keeps."""

from __future__ import annotations

from prometheus_client import Counter


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
