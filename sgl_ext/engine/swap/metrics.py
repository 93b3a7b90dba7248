"""Metrics of swapping on SGLang's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_ext.engine.core.metrics import Metrics, Paced, Totals

_COUNTERS = {
    "swapped_out": "Preemptions of requests whose KV was swapped out.",
    "swapped_in": "Times that a request was resumed without a forward.",
    "recomputed": "Preemptions after which the request was recomputed.",
    "recomputed_tokens": "Tokens that were recomputed after a preemption.",
    "loaded_pages": "Pages that were loaded from host memory.",
    "waits": "Times that device blocks were needed while a copy still read them.",
    "waiting_seconds": "Seconds that the scheduler waited for copies that read device blocks.",
    "loading_seconds": "Seconds that the scheduler waited for the KV of resumed requests.",
    "busy_seconds": "Seconds that the scheduler's thread spent on swapping, without waits.",
}


class SwapMetrics(Paced):
    """Metrics of a scheduler process."""

    def __init__(self, metrics: Metrics) -> None:
        self._counters = {
            name: metrics.counter(f"sglang_ext:swap_{name}", text)
            for name, text in _COUNTERS.items()
        }
        self._swapped = metrics.gauge("sglang_ext:swap_waiting", "Swapped-out requests that wait.")
        self._totals = Totals()

    def update(self, found: Mapping[str, float]) -> None:
        """Sets all metrics to the current statistics of the swap manager."""
        self._updated()
        for name, counter in self._counters.items():
            self._totals.set(counter, found[name])
        self._swapped.of().set(found["swapped"])
