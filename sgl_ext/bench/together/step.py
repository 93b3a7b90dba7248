"""Time that the planner takes of a scheduler's step, over tiers whose loads the benchmark ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from sgl_ext.bench.harness.report import Report
from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import COMPUTE, Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import Shortest
from sgl_ext.planning.want import Run, Want
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages

WAITING = 256
"""Requests that wait, each with a prefix in a lower tier."""
_PAGES, _PAGE = 64, 16
_CONSIDERED = 4
"""Requests that SGLang considers in a step before one is deferred."""


class Lower:
    """Lower tier that has all pages and whose load in progress, if any, ends in :meth:`land`."""

    tier = SimpleNamespace(name="ssd")
    throughput = SimpleNamespace(worthwhile=lambda **_: True)

    def __init__(self) -> None:
        self._loads: list[tuple[int, Callable[..., None]]] = []

    def lookup(self, keys: Sequence[Key]) -> Future[int]:
        found: Future[int] = Future()
        found.set_result(len(keys))
        return found

    def load_then(self, keys: Sequence[Key], _pages: Pages, then: Callable[..., None]) -> None:
        self._loads.append((len(keys), then))

    def land(self) -> None:
        if self._loads:
            count, then = self._loads.pop()
            then(np.ones(count, bool), 1e-3)


def report_step(report: Report, _out: Path, *, quick: bool) -> None:
    """Adds ``planner_step_us``: the median of a step with :data:`WAITING` waiting requests.

    A step advances all wants, and asks for some requests whether they may be computed. Requests
    hold places in host memory (``open``), or all but a few wait for them (``waiting``).
    """
    medians = []
    for what, room in (("open", WAITING * _PAGES), ("waiting", 8 * _PAGES)):
        tier: Any = Lower()
        costs = Costs(
            ComputeCost(1e-3, 1e-4, 1e-8), {"ssd": LoadCost(1e-4, 1e-4)}, chunk=512,
            measured=frozenset({COMPUTE, "ssd"}),
        )  # fmt: skip
        planner = Planner(
            HostPages(room), [tier], Shortest(0.5), costs, page=_PAGE, unit=8, wait=60.0,
            hits=Counter(), clock=time.monotonic, lock=threading.Lock(),
        )  # fmt: skip
        for number in range(WAITING):
            keys = [b"%d-%d" % (number, at) for at in range(_PAGES)]
            planner.restore(Want(f"r{number}", (Run(keys, 0),), _PAGES * _PAGE + 5))
        taken = []
        for step in range(200 if quick else 2000):
            begin = time.perf_counter()
            planner.advance()
            for number in range(_CONSIDERED):
                planner.turn(f"r{(step + number) % WAITING}", False)
            taken.append(time.perf_counter() - begin)
            if step % 2:
                tier.land()
        planner.close()
        each = sorted(1e6 * seconds for seconds in taken)
        medians.append(median(each))
        report.runs.append(
            {
                "what": f"planner step, {WAITING} {what}", "steps": len(each),
                "median_us": medians[-1], "p95_us": each[int(0.95 * len(each))],
            }
        )  # fmt: skip
    report.figures["planner_step_us"] = max(medians)
