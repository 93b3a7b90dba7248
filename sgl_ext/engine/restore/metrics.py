"""Metrics of restored prefixes on SGLang's ``/metrics``."""

from __future__ import annotations

from sgl_ext.engine.core.metrics import Metrics
from sgl_ext.planning.request import Restored


class RestoreMetrics:
    """Metrics of a scheduler process."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.counter(
            "sglang_ext:restore_tokens",
            "Tokens of prefixes that lower tiers held, by the source of their KV.",
            "source",
        )
        self._seconds = metrics.histogram(
            "sglang_ext:restore_seconds",
            "Seconds from a request's arrival until its prefix was restored.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )

    def count(self, restored: Restored) -> None:
        """Counts a restored prefix."""
        for source, tokens in {**restored["loaded"], "computed": restored["computed"]}.items():
            self._tokens.of(source).inc(tokens)
        self._seconds.of().observe(restored["seconds"])
