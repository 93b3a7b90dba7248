"""Exactness of every maximal set of sections: mixed requests against stock SGLang."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_ext.bench.exactness import bench as exactness
from sgl_ext.bench.exactness.tally import FAULTS
from sgl_ext.bench.harness.report import Report
from sgl_ext.config.sets import maximal, written
from sgl_ext.progress import say

_REQUESTS, _QUICK_REQUESTS = 1000, 60
_DEADLINE_S = 600.0
"""Time after which a request counts as hung; the servers of a set share the machine's cores."""


def minutes(*, quick: bool) -> float:
    """Returns the estimated minutes on two cores."""
    return len(maximal()) * (1.2 if quick else 12.0)


def report_exactness(report: Report, out: Path, *, quick: bool) -> None:
    """Adds the counts of each set, and their sums as figures; the faults must be zero."""
    requests = _QUICK_REQUESTS if quick else _REQUESTS
    failed = []
    for fault in FAULTS:
        report.figures[f"exactness_{fault}"] = 0.0
    report.figures["exactness_sets"] = report.figures["exactness_requests"] = 0.0
    for sections in maximal():
        name = written(sections)
        say(f"exactness of {name}: {requests} requests")
        found = exactness.drive(_options(name, requests), out)
        report.runs.append({"what": "exactness", "sections": name, **found.figures})
        for fault in FAULTS:
            report.figures[f"exactness_{fault}"] += found.figures[fault]
        report.figures["exactness_sets"] += 1
        report.figures["exactness_requests"] += found.figures["requests"]
        if found.failed:
            failed.append(found.failed)
    report.failed = "\n".join(filter(None, [report.failed, *failed]))


def _options(name: str, requests: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    exactness.add_arguments(parser)
    return parser.parse_args(
        ["--config", name, "--requests", str(requests), "--deadline", str(_DEADLINE_S)]
    )
