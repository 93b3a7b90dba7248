"""Metrics of linked chunks on SGLang's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.fidelity import Fidelity
    from sgl_ext.engine.chunks.report import Linked

_TOKENS = {
    "linked": "Prompt tokens whose KV was copied from a chunk.",
    "recomputed": "Tokens of chunks that were recomputed by the link method.",
    "missing": "Tokens of chunks that were computed because their KV was missing.",
    "computed": "Tokens of chunks that were computed because that was expected to be faster.",
}


class ChunksMetrics:
    """Metrics of a scheduler process. Create them after SGLang has set its metrics directory."""

    def __init__(self, rank: int) -> None:
        labels = ("tp_rank", "method")
        self._rank = str(rank)
        self._requests = Counter(
            "sglang_ext:chunks_requests", "Admissions of prompts with chunks.", labels
        )
        self._tokens = {
            name: Counter(f"sglang_ext:chunks_{name}_tokens", text, labels)
            for name, text in _TOKENS.items()
        }

    def count(self, linked: Linked) -> None:
        """Counts an admitted request, and its tokens by the source of their KV."""
        labels = (self._rank, linked["method"])
        self._requests.labels(*labels).inc()
        numbers: Mapping[str, object] = linked
        for name, counter in self._tokens.items():
            counter.labels(*labels).inc(float(numbers[name]))  # type: ignore[arg-type]


def export(found: Fidelity, method: str) -> None:
    """Exports the measured fidelity. The server's own process calls it once."""
    gauges = {
        "divergence": (
            found.divergence,
            "Divergence of moved chunks from full computation, in nats.",
        ),
        "exactness": (found.exact, "Divergence of a chunk at its original position, in nats."),
    }
    for name, (nats, text) in gauges.items():
        gauge = Gauge(
            f"sglang_ext:chunks_{name}_nats", text, ("method",), multiprocess_mode="mostrecent"
        )
        gauge.labels(method).set(nats)
