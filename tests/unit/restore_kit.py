"""Planner over real host memory, with a lower tier whose I/O the test controls."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from tier_kit import DEADLINE_S, LAYOUTS, Shelf, arena, content

from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import COMPUTE, Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.plan import Compute, Load, PrefillPlan
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import Shortest
from sgl_ext.planning.want import Run, Want
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.threaded import ThreadedTier

PAGE = 4
UNIT = 2
"""Maximum size of a load, in pages."""


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(1e-3)


class Believed(Costs):
    """Costs that ignore measured loads, so that no test depends on the speed of the machine."""

    def loaded(self, tier: str, tokens: int, seconds: float) -> None:
        pass


class Machine:
    """Planner, the arena of its host memory, and a lower tier."""

    def __init__(self, places: int = 64, wait: float = DEADLINE_S) -> None:
        self.engine = TransferEngine()
        self.arena = arena(self.engine, places, LAYOUTS[PAGE])
        self.host = HostPages(places)
        self.shelf = Shelf(self.arena)
        self.tier = ThreadedTier(self.shelf, keep_after=1, wake=threading.Event().set)
        self.hits: Counter[str] = Counter()
        self.costs = Believed(
            ComputeCost(1e-3, 1e-3),
            {"shelf": LoadCost(0.0, 1e-3)},
            chunk=8,
            measured=frozenset({COMPUTE, "shelf"}),
        )
        self.planner = Planner(
            self.host, [self.tier], Shortest(0.0), self.costs,  # no ageing while a thread waits
            page=PAGE, unit=UNIT, wait=wait, hits=self.hits,
            clock=time.monotonic, lock=threading.Lock(),
        )  # fmt: skip

    def ask(
        self, rid: str, names: list[bytes], here: int, first: int, tokens: int, precedence: int = 0
    ) -> None:
        """Wants the pages of a prefix, of which host memory has the first ``here``."""
        run = Run(names, first * PAGE, here)
        self.planner.restore(Want(rid, (run,), tokens, precedence))

    def keep(self, names: list[bytes]) -> None:
        for name in names:
            page = np.zeros(self.arena.stride, np.uint8)
            block = content(name, LAYOUTS[PAGE]).reshape(-1).view(np.uint8)
            page[: len(block)] = block
            self.shelf.pages[name] = page.tobytes()

    def right(self, rid: str, names: list[bytes], plan: PrefillPlan) -> bool:
        """Returns whether the planner's places hold the pages that the plan loads."""
        for span in plan.spans:
            if isinstance(span.source, Load):
                places = self.planner.places(rid, span.start, span.end)
                wanted = names[span.start // PAGE : span.end // PAGE]
                for name, place in zip(wanted, places, strict=True):
                    block = content(name, LAYOUTS[PAGE]).reshape(-1).view(np.uint8)
                    if not np.array_equal(self.arena.memory[place, : len(block)], block):
                        return False
        return True

    def run(self, rid: str, names: list[bytes], tokens: int, begin: int = 0) -> list[PrefillPlan]:
        """Restores an admitted request without a forward, and returns the plan of each part.

        If the shelf is open, a part with computed tokens takes until one of the remaining loads has
        landed.
        """
        plans = []
        at = begin
        while at < tokens:
            self.planner.advance()
            self.planner.check_integrity()
            plan = self.planner.plan(rid, at, tokens)
            self.planner.check_integrity()
            if plan is None:
                time.sleep(1e-3)
                continue
            end = plan.reach(at, tokens)
            came = self._came(rid)
            self.planner.computing(rid, end)
            self.planner.check_integrity()
            part = [*plan.between(at, end)]
            assert self.right(rid, names, PrefillPlan(plan.spans))
            plans.append(plan)
            at = end
            if any(isinstance(span.source, Compute) for span in part):
                until(
                    lambda came=came: (
                        not (self.shelf.open.is_set() and self.planner.loads(rid))
                        or self._came(rid) > came
                    )
                )
        return plans

    def _came(self, rid: str) -> int:
        """Returns the number of the request's tokens that were loaded so far."""
        report = self.planner.report(rid)
        return 0 if report is None else sum(report["loaded"].values())

    def settle(self) -> None:
        def settled() -> bool:
            self.planner.advance()
            self.planner.check_integrity()
            return not self.planner.wants.leaving

        until(settled)
