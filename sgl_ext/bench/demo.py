"""Times that ``sgl-ext demo`` shows for each power: medians of several runs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.demo.powers import DEMOS
from sgl_ext.models import SMOLLM2
from sgl_ext.progress import Progress

PARTS = (*DEMOS,)
_ROUNDS = 3
_MINUTES = 1.3
"""Longest time of a demonstration on two cores."""

_TOOK = "took"
Times = Sequence[tuple[str, float]]
"""Titles and seconds of the columns of a demonstration that have a time, and of all of it."""


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    config = {"quick": quick, "model": SMOLLM2.name}
    report = Report("demo", config)
    rounds = 1 if quick else _ROUNDS
    kept = Partial(out, "demo", config, quick=quick)
    progress = Progress("demonstrations", rounds * len(parts))
    found: dict[str, list[Times]] = {part: [] for part in parts}
    for number in range(rounds):
        for part in parts:
            found[part].append(kept.find(f"{part}/{number}", partial(times_of, part)))
            progress.step()
    add_times(report, found)
    kept.forget()
    return report


def minutes(options: argparse.Namespace) -> float:
    """Returns about how many minutes a run takes."""
    return _MINUTES * len(options.part or PARTS) * (1 if options.quick else _ROUNDS)


def times_of(power: str) -> Times:
    """Returns the times of one run of a demonstration."""
    began = time.monotonic()
    found = [(each.title, each.seconds) for each in DEMOS[power]() if each.seconds is not None]
    return [*found, (_TOOK, time.monotonic() - began)]


def add_times(report: Report, found: Mapping[str, Sequence[Times]]) -> None:
    """Adds a run for each column, and by how much each column is faster than the first one.

    Args:
        found: by power, the times of each round.
    """
    for power, rounds in found.items():
        columns = {title: [dict(times)[title] for times in rounds] for title, _ in rounds[0]}
        report.figures[f"demo_{power}_took_s"] = statistics.median(columns.pop(_TOOK))
        first = next(iter(columns.values()))
        for number, (title, seconds) in enumerate(columns.items()):
            of_run = [before / after for before, after in zip(first, seconds, strict=True)]
            faster = {
                "speedup": statistics.median(of_run), "speedup_low": min(of_run),
                "speedup_high": max(of_run),
            }  # fmt: skip
            report.runs.append(
                {"what": "demo", "system": power, "column": number, "title": title,
                 "rounds": len(seconds), "low_s": min(seconds), "high_s": max(seconds),
                 **summary(seconds, "seconds"), **(faster if number else {})}
            )  # fmt: skip
            if number:
                report.figures[f"demo_{power}_{number}_speedup"] = faster["speedup"]
