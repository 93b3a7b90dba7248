"""Metrics of linked chunks on SGLang's ``/metrics``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sgl_ext.engine.core.metrics import Metrics

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
    """Metrics of a scheduler process."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(
            "sglang_ext:chunks_requests", "Admissions of prompts with chunks.", "method"
        )
        self._tokens = {
            name: metrics.counter(f"sglang_ext:chunks_{name}_tokens", text, "method")
            for name, text in _TOKENS.items()
        }

    def count(self, linked: Linked) -> None:
        """Counts an admitted request, and its tokens by the source of their KV."""
        method = _kind(linked["method"])
        self._requests.of(method).inc()
        numbers: Mapping[str, object] = linked
        for name, counter in self._tokens.items():
            counter.of(method).inc(float(numbers[name]))  # type: ignore[arg-type]


def _kind(method: str) -> str:
    """Returns the kind of a link method, such as ``lego``; ``several`` for more than one method.

    Clients choose methods with any number, and their order in a prompt; a label may have only a few
    values.
    """
    return "several" if "/" in method else re.sub(r"-\d+$", "", method)


def export(found: Fidelity, method: str, metrics: Metrics) -> None:
    """Exports the measured fidelity. The server's own process calls it once."""
    gauges = {
        "divergence": (
            found.divergence,
            "Divergence of moved chunks from full computation, in nats.",
        ),
        "exactness": (found.exact, "Divergence of a chunk at its original position, in nats."),
    }
    for name, (nats, text) in gauges.items():
        metrics.gauge(f"sglang_ext:chunks_{name}_nats", text, "method").of(method).set(nats)
