"""Metrics of the cost model on SGLang's ``/metrics``."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from sgl_ext.engine.core.metrics import Paced, Totals
from sgl_ext.planning.decisions import Decisions


class PlanningMetrics(Paced):
    """Metrics of a scheduler process. Create it after SGLang has set its metrics directory."""

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._decisions = Counter(
            "sglang_ext:planning_decisions",
            "Decisions between alternatives, by what was chosen.",
            ("tp_rank", "kind", "choice"),
        )
        self._error = Gauge(
            "sglang_ext:planning_error",
            "Median absolute relative error of recent predictions.",
            ("tp_rank", "kind"),
            multiprocess_mode="mostrecent",
        )
        self._totals = Totals()

    def update(self, decisions: Decisions) -> None:
        """Sets all metrics to the current state of the cost model."""
        self._updated()
        for kind, found in decisions.kinds():
            for name, choice in found.choices.items():
                self._totals.set(self._decisions, choice.count, self._rank, kind, name)
            if (error := found.error) is not None:
                self._error.labels(self._rank, kind).set(error)
