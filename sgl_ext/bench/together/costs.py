"""Errors of the predicted costs that decide what powers do, after a mixed trace."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together.mixed import (
    MEMORY,
    QUICK,
    WHOLE,
    materials,
    measured,
    prepared,
    template_of,
    trace_of,
)
from sgl_ext.bench.together.replay import replay
from sgl_ext.bench.together.systems import ALL, scratch
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.progress import say
from sgl_ext.serving import server
from sgl_ext.serving.http import live


def report_costs(report: Report, out: Path, *, quick: bool) -> None:
    """Adds the median error of each kind of prediction, and their median as a figure."""
    model, sizes = prepare(SMOLLM2), QUICK if quick else WHOLE
    template = template_of(model)
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
    for kind, error in found.items():
        report.runs.append({"what": "costs", "kind": kind, "median_error": error})
        report.figures[f"costs_{kind}_median_error"] = error
    if found:
        report.figures["costs_median_error"] = statistics.median(found.values())


def errors(planning: Mapping[str, Any]) -> dict[str, float]:
    """Returns the median absolute relative errors in the state of planning, by kind.

    An error is a number whose key contains ``error``; its kind is the key of the mapping that it
    is in.
    """
    found: dict[str, float] = {}

    def look(name: str, value: Mapping[str, Any]) -> None:
        for key, each in value.items():
            if isinstance(each, Mapping):
                look(key, each)
            elif "error" in key and isinstance(each, int | float) and not isinstance(each, bool):
                found[name] = float(each)

    look("all", planning)
    return found
