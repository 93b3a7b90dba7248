"""Durations of the powers' stages of requests on SGLang's ``/metrics``."""

from __future__ import annotations

from sgl_ext.engine.core.metrics import Metrics

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class StageMetrics:
    """Metrics of a scheduler process."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram(
            "sglang_ext:stage_seconds",
            "Seconds that a request spent in a stage of a power; a trace has a span of each.",
            "stage",
            buckets=_BUCKETS,
        )

    def observe(self, stage: str, seconds: float) -> None:
        """Counts a stage of a request."""
        self._seconds.of(stage).observe(seconds)
