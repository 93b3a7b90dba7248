"""Metrics of the tiers on SGLang's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_ext.engine.core.metrics import Metrics, Paced, Totals
from sgl_ext.tiers.statistics import TierReport

_COUNTERS = {
    "hit_tokens": "Prompt tokens that were not computed because a tier held their KV.",
    "missed_tokens": "Prompt tokens that neither this tier nor a nearer one had.",
    "loaded_bytes": "Bytes of KV loaded from a tier.",
    "loading_seconds": "Seconds that loads from a tier took.",
    "stored_bytes": "Bytes of KV stored in a tier.",
    "storing_seconds": "Seconds that stores into a tier took.",
    "evicted_pages": "Pages that were evicted from a tier.",
}
_GAUGES = {
    "pages": "Pages that a tier holds.",
    "capacity_pages": "Capacity of a tier, in pages.",
    "queue_depth": "Loads and stores that are queued or in progress.",
    "available": "Whether a tier is available (1) or not (0).",
}


_COMMON = "no_room"
"""Reason of failures that all tiers have."""


class TierMetrics(Paced):
    """Metrics of a scheduler process."""

    def __init__(self, metrics: Metrics) -> None:
        self._counters = {
            name: metrics.counter(f"sglang_ext:tiers_{name}", text, "tier")
            for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: metrics.gauge(f"sglang_ext:tiers_{name}", text, "tier")
            for name, text in _GAUGES.items()
        }
        self._failures = metrics.counter(
            "sglang_ext:tiers_failures",
            "Pages that could not be loaded or stored, by reason.",
            "tier", "reason",
        )  # fmt: skip
        self._late = metrics.counter(
            "sglang_ext:tiers_late_loads",
            "Loads still unfinished when tiers.wait expired; the request was admitted and the "
            "missing pages were computed.",
        )
        self._totals = Totals()

    def update(self, reports: Mapping[str, TierReport], late: int) -> None:
        """Sets all metrics to the current statistics of the tiers.

        Args:
            late: :attr:`~sgl_ext.planning.planner.Planner.late`.
        """
        self._updated()
        self._totals.set(self._late, late)
        for tier, report in reports.items():
            numbers: Mapping[str, object] = report
            for name, gauge in self._gauges.items():
                gauge.of(tier).set(float(numbers[name]))  # type: ignore[arg-type]
            for name, counter in self._counters.items():
                total = float(numbers[name])  # type: ignore[arg-type]
                self._totals.set(counter, total, tier)
            # A series that begins with its first failure has no rate before the second one.
            for reason, pages in {_COMMON: 0, **report["failures"]}.items():
                self._totals.set(self._failures, pages, tier, reason)
