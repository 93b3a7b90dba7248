"""Errors of the predicted costs that decide what powers do, after a mixed trace."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together.mixed import (
    MEMORY,
    QUICK,
    WHOLE,
    materials,
    measured,
    prepared,
    trace_of,
)
from sgl_ext.bench.together.replay import replay
from sgl_ext.bench.together.systems import ALL, scratch
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.progress import say
from sgl_ext.serving import server
from sgl_ext.serving.http import live


def report_costs(report: Report, out: Path, *, quick: bool) -> None:
    """Adds the median error of the predictions of each kind, and of all.

    The latter is the median of the kinds' medians, each of which counts as often as predictions of
    its kind were compared.
    """
    model, sizes = prepare(SMOLLM2), QUICK if quick else WHOLE
    template = Template.of_model(model)
    made = materials(model, template, sizes)
    with scratch(out) as places:
        logs = out / "logs" / "costs"
        unit, memory = measured(model, logs, MEMORY)
        with server.serve([memory.system(ALL, places)], model, logs) as (one,):
            for number, material in enumerate(made):
                contexts = prepared(one, template, material)
                replay(one.url, trace_of(material, number), unit, contexts)
            planning = live(one.url).get("planning")
    if not planning:
        say("costs: /server_info has no sgl_ext.planning, so predictions are not compared")
        report.runs.append({"what": "costs", "kind": "none reported"})
        return
    found = errors(planning)
    for kind, (error, compared) in found.items():
        run = {"what": "costs", "kind": kind, "median_error": error, "predictions": compared}
        report.runs.append(run)
        report.figures[f"costs_{kind}_median_error"] = error
    if found:
        report.figures["costs_median_error"] = weighted_median(found.values())
        each = [error for error, _ in found.values()]
        report.figures["costs_median_error_of_kinds"] = statistics.median(each)


def errors(planning: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Returns the median absolute relative error and the number of predictions, by kind."""
    return {
        kind: (found["error"], found["compared"])
        for kind, found in planning["decisions"].items()
        if found["compared"]
    }


def weighted_median(pairs: Iterable[tuple[float, int]]) -> float:
    """Returns the least of some values that has half of the weight at or below it.

    Args:
        pairs: values and their weights, at least one.
    """
    values, weights = zip(*sorted(pairs), strict=True)
    reached = [*accumulate(weights)]
    return float(values[bisect_left(reached, reached[-1] / 2)])
