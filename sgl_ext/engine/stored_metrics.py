"""Stored contexts on SGLang's ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from sgl_ext.engine.totals import Totals

_INTERVAL_S = 1.0
BLOCKS = ("fetched", "expected", "in_memory")
"""Where a block that is wanted comes from: read now, read ahead, or there."""


class StoredMetrics:
    """Metrics of a scheduler process; made after SGLang has set its metrics directory."""

    def __init__(self) -> None:
        self._blocks = Counter(
            "sglang_ext:clusters_blocks",
            "Blocks of stored contexts that queries were given, by where they came from.",
            ("source",),
        )
        self._seconds = Counter(
            "sglang_ext:clusters_seconds",
            "Seconds of the forwards' thread, by what they were spent on.",
            ("what",),
        )
        self._gauges = {
            name: Gauge(f"sglang_ext:clusters_{name}", text, multiprocess_mode="mostrecent")
            for name, text in (
                ("open", "Stored contexts that are open."),
                ("followed", "Requests that follow one."),
            )
        }
        self._totals = Totals()
        self._next = 0.0

    @property
    def due(self) -> bool:
        """Whether the last update is a while ago."""
        return time.monotonic() >= self._next

    def update(self, totals: Mapping[str, float], opened: int, followed: int) -> None:
        """Sets every metric.

        Args:
            totals: blocks and seconds since the process began, of all contexts together.
        """
        self._next = time.monotonic() + _INTERVAL_S
        for name, total in totals.items():
            self._totals.set(self._blocks if name in BLOCKS else self._seconds, total, name)
        self._gauges["open"].set(opened)
        self._gauges["followed"].set(followed)
