"""Prometheus metrics of a process, with the labels that SGLang gives its own.

Import it after SGLang has set its metrics directory, which the client reads when it is imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

_INTERVAL_S = 1.0
_STAGE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
"""Upper bounds of the durations of stages, in seconds."""
_PRIORITY = "priority"
"""Label of SGLang's for requests; metrics of a process have no value for it."""

Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class Family(Generic[Kind]):
    """Metric with labels of the process and labels of its own."""

    def __init__(self, metric: Kind, process: Sequence[str]) -> None:
        self._metric: Kind = metric
        self._process = process

    def of(self, *own: str) -> Kind:
        """Returns the metric with values of its own labels, in their order."""
        names = (*self._process, *own)
        found: Kind = self._metric.labels(*names) if names else self._metric
        return found


class Metrics:
    """Factory of the metrics of a process.

    Args:
        labels: labels that SGLang gives its metrics of this process, such as ``model_name`` and
            ``tp_rank``. A label of a metric's own replaces one of the same name.
    """

    def __init__(self, labels: Mapping[str, object]) -> None:
        self._labels = {name: str(of) for name, of in labels.items() if name != _PRIORITY}

    def counter(self, name: str, text: str, *own: str) -> Family[Counter]:
        """Creates a counter with labels ``own``; see :class:`prometheus_client.Counter`."""
        names, process = self._with(own)
        return Family(Counter(name, text, names), process)

    def gauge(self, name: str, text: str, *own: str) -> Family[Gauge]:
        """Creates a gauge whose value is the one that was set most recently."""
        names, process = self._with(own)
        return Family(Gauge(name, text, names, multiprocess_mode="mostrecent"), process)

    def histogram(
        self, name: str, text: str, *own: str, buckets: Sequence[float]
    ) -> Family[Histogram]:
        """Creates a histogram with these upper bounds."""
        names, process = self._with(own)
        return Family(Histogram(name, text, names, buckets=buckets), process)

    def _with(self, own: Sequence[str]) -> tuple[list[str], list[str]]:
        process = {name: of for name, of in self._labels.items() if name not in own}
        return [*process, *own], [*process.values()]


def stage_seconds(metrics: Metrics) -> Family[Histogram]:
    """Creates the metric of the durations of the powers' stages."""
    return metrics.histogram(
        "sglang_ext:stage_seconds",
        "Seconds that a request spent in a stage of a power; a trace has a span of each.",
        "stage",
        buckets=_STAGE_BUCKETS,
    )


class Paced:
    """Base class of metrics that are updated at most once per second."""

    _next = 0.0

    @property
    def due(self) -> bool:
        """True if an update is due."""
        return time.monotonic() >= self._next

    def _updated(self) -> None:
        self._next = time.monotonic() + _INTERVAL_S


class Totals:
    """Counters that follow totals. A total that fell, because its owner restarted, adds nothing."""

    def __init__(self) -> None:
        self._counted: dict[tuple[object, ...], float] = {}

    def set(self, counter: Family[Counter], total: float, *own: str) -> None:
        """Adds the growth of the total since the last call to the counter.

        Args:
            own: values of the counter's own labels.
        """
        key = (counter, *own)
        counter.of(*own).inc(max(total - self._counted.get(key, 0.0), 0.0))
        self._counted[key] = total
