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

    def count(self, restored: Restored) -> None:
        """Counts a restored prefix."""
        for source, tokens in {**restored["loaded"], "computed": restored["computed"]}.items():
            self._tokens.of(source).inc(tokens)
