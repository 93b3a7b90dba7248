"""Metrics of the tiers on SGLang's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from sgl_ext.engine.core.metrics import Paced, Totals
from sgl_ext.tiers.statistics import TierReport

_COUNTERS = {
    "hit_tokens": "Prompt tokens that were not computed because a tier held their KV.",
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


class TierMetrics(Paced):
    """Metrics of a scheduler process. Create it after SGLang has set its metrics directory."""

    def __init__(self, tp_rank: int, pp_rank: int) -> None:
        labels = ("tp_rank", "pp_rank", "tier")
        self._ranks = str(tp_rank), str(pp_rank)
        self._counters = {
            name: Counter(f"sglang_ext:tiers_{name}", text, labels)
            for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"sglang_ext:tiers_{name}", text, labels, multiprocess_mode="mostrecent")
            for name, text in _GAUGES.items()
        }
        self._failures = Counter(
            "sglang_ext:tiers_failures",
            "Pages that could not be loaded or stored, by reason.",
            (*labels, "reason"),
        )
        self._totals = Totals()

    def update(self, reports: Mapping[str, TierReport]) -> None:
        """Sets all metrics to the current statistics of the tiers."""
        self._updated()
        for tier, report in reports.items():
            numbers: Mapping[str, object] = report
            for name, gauge in self._gauges.items():
                gauge.labels(*self._ranks, tier).set(float(numbers[name]))  # type: ignore[arg-type]
            for name, counter in self._counters.items():
                total = float(numbers[name])  # type: ignore[arg-type]
                self._totals.set(counter, total, *self._ranks, tier)
            for reason, pages in report["failures"].items():
                self._totals.set(self._failures, pages, *self._ranks, tier, reason)
