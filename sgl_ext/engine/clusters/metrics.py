"""Metrics of stored contexts on SGLang's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_ext.engine.core.metrics import Metrics, Paced, Totals

BLOCKS = ("fetched", "prefetched", "in_memory")
"""Sources of a wanted block: read when it is wanted, prefetched, or in memory."""


class StoredMetrics(Paced):
    """Metrics of a scheduler process."""

    def __init__(self, metrics: Metrics) -> None:
        self._blocks = metrics.counter(
            "sglang_ext:clusters_blocks",
            "Blocks of stored contexts that were selected for queries, by their source.",
            "source",
        )
        self._seconds = metrics.counter(
            "sglang_ext:clusters_seconds",
            "Seconds that the thread of the forwards spent, by activity.",
            "what",
        )
        self._gauges = {
            name: metrics.gauge(f"sglang_ext:clusters_{name}", text)
            for name, text in (
                ("open", "Stored contexts that are open."),
                ("followed", "Requests that use a stored context."),
                ("lost_devices", "Devices that open contexts have lost, summed over contexts."),
            )
        }
        self._failed = metrics.counter(
            "sglang_ext:clusters_failed_requests",
            "Requests with a stored context that the scheduler has refused or ended.",
        )
        self._totals = Totals()

    def update(
        self, totals: Mapping[str, float], opened: int, followed: int, lost: int, failed: int
    ) -> None:
        """Sets every metric.

        Args:
            totals: blocks and seconds since the process began, summed over all contexts.
            opened: number of open contexts.
            followed: number of requests that use a context.
            lost: number of devices that open contexts have lost.
            failed: number of requests that were refused or ended since the process began.
        """
        self._updated()
        for name, total in totals.items():
            self._totals.set(self._blocks if name in BLOCKS else self._seconds, total, name)
        self._gauges["open"].of().set(opened)
        self._gauges["followed"].of().set(followed)
        self._gauges["lost_devices"].of().set(lost)
        self._totals.set(self._failed, failed)
