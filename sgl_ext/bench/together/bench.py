"""All powers on one server: exactness, and what they gain by deciding together.

Each part starts the servers that it compares, and they answer in turn. ``mixed`` describes its
trace in the report. ``mixed``, ``costs`` and ``linked_from_ssd`` emulate an SSD as slow as
computing, the other parts use the directory of ``--out`` as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together import exact
from sgl_ext.bench.together.costs import report_costs
from sgl_ext.bench.together.exact import report_exactness
from sgl_ext.bench.together.idle import report_idle
from sgl_ext.bench.together.linked import report_linked
from sgl_ext.bench.together.mixed import report_mixed
from sgl_ext.bench.together.reclaim import report_reclaim
from sgl_ext.bench.together.step import report_step
from sgl_ext.bench.together.swapped import report_swap_to_ssd
from sgl_ext.progress import say


class Part(NamedTuple):
    """Part of the benchmark.

    Attributes:
        measure: adds runs and figures to a report, with files in a directory.
        quick, whole: estimated minutes of a quick run and of a whole one on two cores.
    """

    measure: Callable[..., None]
    quick: float
    whole: float


_PARTS: Mapping[str, Part] = {
    "exactness": Part(report_exactness, exact.minutes(quick=True), exact.minutes(quick=False)),
    "mixed": Part(report_mixed, 20, 70),
    "swap_to_ssd": Part(report_swap_to_ssd, 6, 25),
    "linked_from_ssd": Part(report_linked, 4, 12),
    "reclaim": Part(report_reclaim, 2, 5),
    "costs": Part(report_costs, 4, 12),
    "idle": Part(report_idle, 2, 12),
    "step": Part(report_step, 0.1, 0.5),
}
PARTS = tuple(_PARTS)


def minutes(options: argparse.Namespace) -> float:
    """Returns the estimated minutes of a run on two cores."""
    chosen = [_PARTS[name] for name in options.part or PARTS]
    return sum(part.quick if options.quick else part.whole for part in chosen)


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    report = Report("together", {"quick": quick, "parts": [*parts]})
    for name in parts:
        part = _PARTS[name]
        say(f"together {name}: about {part.quick if quick else part.whole:g} minutes on 2 cores")
        part.measure(report, out, quick=quick)
        report.write(out / "partial")  # kept if a later part fails
    return report
