"""Metrics of lending and borrowing on SGLang's ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_ext.engine.core.metrics import Metrics, Paced, Totals

_GAUGES = {
    "lendable_bytes": ("lendable_bytes", "KV memory that a worker may lend, in bytes."),
    "lent_bytes": ("lent_bytes", "KV memory that a worker has lent, in bytes."),
    "used_bytes": ("used_bytes", "KV memory lent by a worker that its masters use, in bytes."),
    "borrowed_bytes": ("borrowed_bytes", "KV memory of workers that a master uses, in bytes."),
}
_COUNTERS = {
    "lent": ("granted_bytes", "KV memory that a worker has lent in total, in bytes."),
    "reclaimed": ("reclaimed_bytes", "KV memory that a worker has reclaimed in total, in bytes."),
    "replaced": (
        "replacements",
        "Times that a worker replaced lent memory that was not returned by the deadline.",
    ),
    "retracted": ("retractions", "Requests that were retracted because memory was reclaimed."),
    "stream_bytes": ("stream_bytes", "Bytes that were copied through a master's layer buffers."),
    "stream_waited_seconds": (
        "stream_waited_seconds",
        "Seconds that a master's forwards waited for its layer buffers.",
    ),
}


class PeerMetrics(Paced):
    """Metrics of a scheduler process.

    Args:
        found: statistics as for :meth:`update`; metrics are created for the keys that it has.
    """

    def __init__(self, metrics: Metrics, found: Mapping[str, Any]) -> None:
        self._role = str(found["role"])
        self._gauges = {
            key: metrics.gauge(f"sglang_ext:peer_{name}", text, "role")
            for key, (name, text) in _GAUGES.items()
            if key in found
        }
        self._counters = {
            key: metrics.counter(f"sglang_ext:peer_{name}", text, "role")
            for key, (name, text) in _COUNTERS.items()
            if key in found
        }
        self._totals = Totals()

    def update(self, found: Mapping[str, Any]) -> None:
        """Sets all metrics to statistics of :meth:`~sgl_ext.engine.peer.side.PeerSide.describe`."""
        self._updated()
        for key, gauge in self._gauges.items():
            gauge.of(self._role).set(found[key])
        for key, counter in self._counters.items():
            self._totals.set(counter, found[key], self._role)
