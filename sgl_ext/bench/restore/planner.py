"""Cost of decisions for the scheduler's thread while many requests wait to be restored."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.harness.report import Report
from sgl_ext.errors import ExtError
from sgl_ext.restore.costs import ComputeCost, Costs, LoadCost
from sgl_ext.restore.policies import POLICIES
from sgl_ext.restore.restorer import Restorer
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.tier import TierStatistics

_REQUESTS = 256
_PAGE = 16
_PAGES = 128
"""Pages of each request's prefix."""
_STEPS = 300
_AGEING = 0.2
_DEADLINE_S = 60.0


class _Asleep:
    """Tier that has all pages, and whose loads block until it is closed and then load none."""

    name = "ssd"
    immediate = True
    available = True

    def __init__(self) -> None:
        self._awake = threading.Event()

    def lookup(self, keys: Sequence[Key]) -> int:
        return len(keys)

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:  # noqa: ARG002
        self._awake.wait(_DEADLINE_S)
        return np.zeros(len(keys), bool)

    def store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:  # noqa: ARG002
        return np.zeros(len(keys), bool)

    def statistics(self) -> TierStatistics:
        return TierStatistics(0, 0, 0, {})

    def close(self) -> None:
        self._awake.set()


def report_planner(report: Report) -> None:
    """Adds the cost of a scheduler step under each policy, with all requests being restored."""
    for policy in POLICIES:
        tier = _Asleep()
        lower = LowerTier(tier, keep_after=1, wake=lambda: None)
        restorer = Restorer(
            HostPages(_REQUESTS * _PAGES), [lower], POLICIES[policy](_AGEING),
            Costs(ComputeCost(), {tier.name: LoadCost()}, chunk=512),
            page=_PAGE, unit=8, wait=60.0, hits=Counter(),
        )  # fmt: skip
        try:
            requests = _begin(restorer)
            steps = [_step(restorer, requests) for _ in range(_STEPS)]
        finally:
            tier.close()
            restorer.close()
            lower.close()
        deciding, asking = (statistics.median(each) for each in zip(*steps, strict=True))
        report.runs.append(
            {
                "what": f"a step with {_REQUESTS} requests that wait",
                "system": policy,
                "samples": _STEPS,
                "deciding_us": deciding * 1e6,
                "asking_us": asking * 1e6,
            }
        )
        for figure, seconds in (("planner_us", deciding), ("planner_asking_us", asking)):
            report.figures[figure] = max(report.figures.get(figure, 0.0), seconds * 1e6)


def _begin(restorer: Restorer) -> dict[str, list[Key]]:
    """Opens restorations of requests whose prefix the tier has.

    Returns:
        Keys of the pages of each request, by request id.

    Raises:
        ExtError: not all were opened before the deadline.
    """
    rids = [f"request {number}" for number in range(_REQUESTS)]
    asked = {rid: [f"{rid} {page}".encode() for page in range(_PAGES)] for rid in rids}
    for rid, keys in asked.items():
        _ask(restorer, rid, keys)
    give_up = time.monotonic() + _DEADLINE_S
    while not all(map(restorer.restores, rids)):
        if time.monotonic() > give_up:
            raise ExtError(f"{_REQUESTS} requests were not opened in {_DEADLINE_S:g} s")
        restorer.advance()
        time.sleep(1e-3)
    return asked


def _ask(restorer: Restorer, rid: str, keys: Sequence[Key]) -> None:
    restorer.ask(rid, keys, here=0, first=0, behind=_PAGES * _PAGE + 100)


def _step(restorer: Restorer, requests: Mapping[str, Sequence[Key]]) -> tuple[float, float]:
    """Performs what one step of the scheduler asks of the restorer.

    Returns:
        Seconds of choosing the request that is computed next and planning its forward; seconds of
        the calls for each request, because SGLang looks all of them up in each step.
    """
    rids = [*requests]
    began = time.perf_counter()
    restorer.advance()
    restorer.turn(rids[-1], continuing=False)
    restorer.plan(rids[0], 0, _PAGES * _PAGE + 100)
    decided = time.perf_counter()
    turns = 0
    for rid, keys in requests.items():
        _ask(restorer, rid, keys)
        turns += restorer.turn(rid, continuing=False)
    asked = time.perf_counter()
    if turns != 1:
        raise RuntimeError(f"{turns} requests may be computed in one step; expected one")
    return decided - began, asked - decided
