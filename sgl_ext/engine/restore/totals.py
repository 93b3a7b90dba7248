"""Totals of restored prefixes: on ``/server_info`` and on SGLang's ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sgl_ext.planning.request import Restored

if TYPE_CHECKING:
    from sgl_ext.engine.core.metrics import Metrics


class RestoreTotals:
    """Totals of a scheduler process since its start.

    Args:
        metrics: factory of the process's metrics; None to export none.
    """

    def __init__(self, metrics: Metrics | None) -> None:
        self._prompts = 0
        self._tokens: Counter[str] = Counter()
        self._exported = None
        if metrics is not None:
            self._exported = metrics.counter(
                "sglang_ext:restore_tokens",
                "Tokens of prefixes that lower tiers held, by the source of their KV.",
                "source",
            )

    def count(self, restored: Restored) -> None:
        """Counts a restored prefix."""
        self._prompts += 1
        for source, tokens in {**restored["loaded"], "computed": restored["computed"]}.items():
            self._tokens[source] += tokens
            if self._exported is not None:
                self._exported.of(source).inc(tokens)

    def describe(self) -> Mapping[str, object]:
        """Returns the number of restored prompts, and their tokens by the source of their KV."""
        return {"prompts": self._prompts, "tokens": dict(self._tokens)}
