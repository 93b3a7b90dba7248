"""Metrics of the cost model on SGLang's ``/metrics``."""

from __future__ import annotations

from sgl_ext.engine.core.metrics import Metrics, Paced, Totals
from sgl_ext.planning.decisions import Decisions


class PlanningMetrics(Paced):
    """Metrics of a scheduler process."""

    def __init__(self, metrics: Metrics) -> None:
        self._decisions = metrics.counter(
            "sglang_ext:planning_decisions",
            "Decisions between alternatives, by what was chosen.",
            "kind", "choice",
        )  # fmt: skip
        self._error = metrics.gauge(
            "sglang_ext:planning_error",
            "Median absolute relative error of recent predictions.",
            "kind",
        )
        self._totals = Totals()

    def update(self, decisions: Decisions) -> None:
        """Sets all metrics to the current state of the cost model."""
        self._updated()
        for kind, found in decisions.kinds():
            for name, choice in found.choices.items():
                self._totals.set(self._decisions, choice.count, kind, name)
            if (error := found.error) is not None:
                self._error.of(kind).set(error)
