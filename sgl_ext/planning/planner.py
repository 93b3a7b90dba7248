"""Planner: where the KV of each request's pages comes from, for one scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clock import Clock
from sgl_ext.planning.channels import Channels
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.deadlines import Deadlines
from sgl_ext.planning.parts import Part, gives_way, next_part, plan_of
from sgl_ext.planning.plan import PrefillPlan
from sgl_ext.planning.policies import Policy
from sgl_ext.planning.request import Request, Restored
from sgl_ext.planning.turns import Turns
from sgl_ext.planning.want import Name, Run, Want
from sgl_ext.planning.wants import Wants
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier


class Landed(NamedTuple):
    """Loaded pages of a run."""

    run: Run
    numbers: NDArray[np.int64]
    """Numbers of the pages in the run, ascending, int64 ``[pages]``."""
    places: Pages
    """Their places in host memory."""


class Planner:
    """Plans the loads of the requests of a scheduler.

    Pages of a want are loaded as a whole before the request is admitted (:meth:`load`), or a part
    of them is computed while the others load (:meth:`restore`).

    Only the scheduler's thread calls it, and no method waits for a device.

    Args:
        tiers: tiers below host memory, nearest first.
        page: tokens of a page.
        unit: maximum pages of one load of a want of which a part is computed; with a smaller one
            pointers meet more closely.
        wait: seconds within which tiers have to answer a lookup, and whole wants are awaited.
        spare: places of host memory that wants leave free for others.
        hits: counter of loaded pages by tier, which the planner updates.
        clock: clock of arrivals, leases and loads.
        lock: lock of the state that the threads of the tiers change, too.
    """

    def __init__(
        self,
        host: HostPages,
        tiers: Sequence[LowerTier],
        policy: Policy,
        costs: Costs,
        *,
        page: int,
        unit: int,
        wait: float,
        hits: Counter[str],
        clock: Clock,
        lock: AbstractContextManager[object],
        spare: int = 0,
    ) -> None:
        self._clock = clock
        self.costs = costs
        self.page = page
        self._tiers = tiers
        self._channels = Channels(tiers, policy, costs, page=page, clock=clock, lock=lock)
        self.wants = Wants(
            host, tiers, self._channels,
            page=page, unit=unit, spare=spare, hits=hits, clock=clock,
        )  # fmt: skip
        self._deadlines = Deadlines(wait)
        """Deadlines of whole wants and of :meth:`patient`, from when a request is first considered
        for admission."""
        self._turns = Turns(self.wants, self._channels, costs, wait=wait, clock=clock)
        self._epoch = costs.epoch

    # --- wants that are loaded as a whole ---------------------------------------------------------

    def load(self, want: Want) -> None:
        """Starts to load the pages of a want as a whole, from tiers that are worth waiting for."""
        tiers = self._tiers
        tokens = sum(len(run.keys) - run.here for run in want.runs) * self.page
        if want.name not in self.wants.requests and tokens:
            begin = min(run.start + run.here * self.page for run in want.runs)
            tiers = [
                tier for tier in tiers if self._worthwhile(want.name, tier, tokens, max(begin, 0))
            ]
        if tiers and tokens:
            self.wants.ask(want, whole=True, tiers=tiers)

    def _worthwhile(self, name: Name, tier: LowerTier, tokens: int, begin: int) -> bool:
        key = _decision(name, tier)
        faster = self.costs.worth_loading(tier.tier.name, tokens, begin, key)
        return tier.throughput.worthwhile(faster=faster)

    def ready(self, name: Name) -> bool:
        """Returns whether a request need not be held back for a whole want.

        True if it does not wait, its load has ended, or it was held back for the longest time
        allowed. Call it when the request is considered for admission: the first call starts this
        time.
        """
        if (request := self.wants.requests.get(name)) is not None:
            request.seen = self._clock()
        waits = name in self.wants.unopened or name in self.wants.opened
        if not waits and not self.wants.follows(name):
            return True
        return self._deadlines.passed(name, self._clock())

    @property
    def late(self) -> int:
        """Number of wants that requests were not held back for any longer, because the longest time
        allowed had passed."""
        return self._deadlines.late + self._turns.late

    def take(self, name: Name) -> Request | None:
        """Removes a whole want whose request is admitted or gone, and returns it.

        Its pages are unpinned; loads that have begun still land. Returns None if it did not load
        pages itself.
        """
        self._deadlines.forget(name)
        request = self.release(name)
        landed = {} if request is None else request.landed
        for tier in self._tiers:
            seconds = request.seconds if request is not None and tier.tier.name in landed else None
            self.costs.decisions.ended("wait_for_tier", _decision(name, tier), seconds)
        return request

    # --- wants of which a part is computed --------------------------------------------------------

    def restore(self, want: Want) -> None:
        """Starts to load the pages of a want, a part of which the prompt's forwards compute."""
        self.wants.ask(want, whole=False)

    def run(self, name: Name) -> Run | None:
        """Returns the only run of a want of which tiers may have pages; None if there is none."""
        request = self.wants.requests.get(name)
        return None if request is None else request.want.runs[0]

    def undecided(self, name: Name) -> bool:
        """Returns whether it is not known yet which pages of a want will be loaded.

        Tiers have not answered, host memory has no room, or another want loads the same pages.
        False if this has lasted for the longest time allowed since the first call.
        """
        if name not in self.wants.unopened and not self.wants.follows(name):
            return False
        return self.patient(name)

    def patient(self, name: Name) -> bool:
        """Returns whether a request may wait for its want: less than the longest time allowed has
        passed since this was asked first."""
        return self._deadlines.holds(name, self._clock())

    def found(self, name: Name) -> int:
        """Returns up to which page of a want's lacking pages tiers have some."""
        active = self.wants.opened.get(name)
        return 0 if active is None else active.pointers.end

    def restores(self, name: Name) -> bool:
        """Returns whether pages of the want were found and are not released yet."""
        active = self.wants.opened.get(name)
        return active is not None and not active.whole

    def loads(self, name: Name) -> bool:
        """Returns whether pages of the want are being loaded or will be."""
        if (active := self.wants.opened.get(name)) is None:
            return False
        with self._channels.lock:
            return not active.pointers.settled

    def computes(self, name: Name) -> bool:
        """Returns whether the want is that of the request whose prompt is being computed."""
        active = self.wants.opened.get(name)
        return active is not None and active is self._channels.computing

    def turn(self, name: Name, continuing: bool) -> bool:
        """Returns whether a waiting request may be computed now; see :meth:`Turns.turn`."""
        return self._turns.turn(name, continuing=continuing)

    def gives_way(self, name: Name, begin: int, others: int) -> bool:
        """Returns whether a prompt should be loaded only, while ``others`` prompts are computed.

        Args:
            begin: first token that its next forward would compute.
        """
        if not others or (active := self.wants.opened.get(name)) is None or active.whole:
            return False
        with self._channels.lock:
            free = active.pointers.next_free
            return gives_way(
                active.pointers,
                active.at,
                self.costs,
                begin,
                busy=inf if free is None else self._channels.busy(active, free.tier),
                others=others,
                key=str(name),
            )

    def part(self, name: Name, begin: int) -> Part | None:
        """Returns what the request's next forward, from token ``begin`` on, loads and computes.

        Returns:
            None if waiting for loads is faster than computing.
        """
        if (active := self.wants.opened.get(name)) is None:
            return Part((), None)
        pointers, at, now = active.pointers, active.at, self._clock()
        active.part = None
        with self._channels.lock:
            active.position = begin
            if self._channels.computing is not active:
                pointers.front = at.before(begin)
                if not active.reached:
                    active.first = pointers.front
                self._channels.changed(active)
            free, flying = pointers.next_free, pointers.flying
            until = next_part(
                pointers,
                at,
                self.costs,
                begin,
                flying_for=0.0 if flying is None else now - flying.began,
                busy=0.0 if free is None else self._channels.busy(active, free.tier),
            )
            if until is None:
                return None
            loaded = (*pointers.loaded(),)
        # Forwards end with whole pages of the device, in which those of a chunk may begin anywhere.
        until = max(until, (begin // self.page + 1) * self.page)
        active.part = Part(loaded, until if until < at.end(pointers.end) else None)
        return active.part

    def planned(self, name: Name) -> tuple[Part, list[Landed]]:
        """Returns the latest :meth:`part` of a want, and the loaded pages of each of its runs.

        Nothing is loaded, and nothing has to be awaited, of a want that is not being restored.
        """
        if (active := self.wants.opened.get(name)) is None or active.part is None:
            return Part((), None), []
        request = self.wants.requests[name]
        numbers = np.concatenate(
            [np.empty(0, np.int64), *(np.arange(*run) for run in active.part.loaded)]
        )
        firsts = [first for first, _ in request.lookups]
        cuts = np.searchsorted(numbers, [*firsts, len(request.keys)])
        each = zip(request.want.runs, firsts, cuts, cuts[1:], strict=False)
        return active.part, [
            Landed(run, numbers[a:b] - first + run.here, active.places[numbers[a:b]])
            for run, first, a, b in each
        ]

    def computing(self, name: Name, until: int) -> None:
        """Records that the next batch has a forward of the request up to token ``until``."""
        if (active := self.wants.opened.get(name)) is None:
            return
        with self._channels.lock:
            active.pointers.compute(min(active.at.before(until), active.pointers.end))
            active.reached = active.position = until
            self._channels.computing = active
            self._channels.changed(active)

    def preferred(self) -> Name | None:
        """Returns the want whose request should interrupt the one that is computed, if any."""
        return self._turns.preferred()

    def interrupt(self) -> None:
        """Interrupts the prompt that is being computed; see :meth:`Turns.interrupt`."""
        self._turns.interrupt()

    @property
    def interrupted(self) -> int:
        """Number of times that a prompt being computed was interrupted."""
        return self._turns.interrupted

    def plan(self, name: Name, begin: int, end: int) -> PrefillPlan | None:
        """Returns the plan of the next forward of a prompt whose prefix is restored; see
        :meth:`part`.

        Args:
            end: tokens of the prompt.
        """
        part = self.part(name, begin)
        return None if part is None else self.prefix_plan(name, part, end)

    def prefix_plan(self, name: Name, part: Part, end: int) -> PrefillPlan:
        """Returns the plan of a prompt of ``end`` tokens, a part of whose prefix is loaded."""
        active = self.wants.opened.get(name)
        loaded = [] if active is None else [active.at.tokens(*run) for run in part.loaded]
        return plan_of(loaded, end, stop=part.stop)

    def linked(self, name: Name) -> bool:
        """Returns whether a want has the pages of chunks, which a plan links."""
        request = self.wants.requests.get(name)
        return request is not None and request.want.linked

    def places(self, name: Name, begin: int, end: int) -> Pages:
        """Returns the places in host memory of the pages at positions ``begin .. end - 1``."""
        active = self.wants.opened[name]
        return active.places[active.at.before(begin) : active.at.before(end)]

    def tiers(self, name: Name, begin: int, end: int) -> Counter[str]:
        """Returns the number of tokens ``begin .. end - 1``, which were loaded, by tier."""
        active, found = self.wants.opened[name], Counter[str]()
        for tier, first, last in active.pointers.regions():
            if first < last:
                tokens = active.at.tokens(first, last)
                found[tier] += max(min(end, tokens.stop) - max(begin, tokens.start), 0)
        return found

    def spared(self, name: Name) -> list[range]:
        """Returns the positions whose pages a tier has, and no load has taken so far."""
        if (active := self.wants.opened.get(name)) is None or active.whole:
            return []
        with self._channels.lock:
            stretches = [(one.begin, one.end) for one in active.pointers.stretches]
        return [active.at.tokens(*run) for run in stretches]

    def limit(self, name: Name, end: int) -> None:
        """Stops to load pages of tokens from ``end`` on, which are not restored."""
        if (active := self.wants.opened.get(name)) is not None:
            with self._channels.lock:
                active.pointers.limit(active.at.before(end))
                self._channels.changed(active)

    def report(self, name: Name, end: int | None = None) -> Restored | None:
        """Returns the report of a restoration that is complete; None if there is none.

        Args:
            end: end of the tokens that were restored; None for those of all pages.
        """
        if (active := self.wants.opened.get(name)) is None:
            return None
        pointers = active.pointers
        last = pointers.end if end is None else min(active.at.before(end), pointers.end)
        loaded: dict[str, int] = {}
        with self._channels.lock:
            for tier, first, behind in pointers.regions():
                pages = range(max(first, active.first), min(behind, last))
                if came := sum(map(pointers.came, pages)):
                    loaded[tier] = loaded.get(tier, 0) + came * self.page
        computed = max(last - active.first, 0) * self.page - sum(loaded.values())
        seconds = self._clock() - active.arrived
        return Restored(loaded=loaded, computed=computed, seconds=seconds)

    # --- all wants --------------------------------------------------------------------------------

    def release(self, name: Name) -> Request | None:
        """Ends a want whose request is restored or gone; see :meth:`Wants.release`."""
        return self._turns.release(name)

    def give_up_one(self) -> bool:
        """Releases a want that keeps pages in host memory and is not being computed.

        Chooses the newest that is restored or whose request was not considered for admission yet,
        otherwise the newest.
        Its pages can then be evicted. Its next lookup asks tiers again.

        Returns:
            False if there is no such want.
        """
        keeping = [*self.wants.keeping()]
        if not keeping:
            return False
        early = (name for name in keeping if name not in self._deadlines)
        self.release(next(early, keeping[0]))
        return True

    def advance(self) -> None:
        """Advances all wants without waiting; called once per scheduler step."""
        if self._epoch != self.costs.epoch:
            self._epoch = self.costs.epoch
            with self._channels.lock:
                for active in self.wants.opened.values():
                    self._channels.changed(active)
        self._turns.advance()
        self.wants.advance()
        self._deadlines.prune(len(self.wants.requests), self.wants)  # leases may have expired

    def pending(self) -> bool:
        """Returns whether any want is being looked up or loaded."""
        return self.wants.pending()

    def clear(self) -> list[Name]:
        """Releases all wants and returns their names."""
        self._deadlines.clear()
        self._turns.clear()
        return self.wants.clear()

    def close(self) -> None:
        self._channels.close()
        self.clear()

    def check_integrity(self) -> None:
        """Checks the wants, channels and host memory; see :meth:`Wants.check_integrity`."""
        self.wants.check_integrity()


def _decision(name: Name, tier: LowerTier) -> str:
    """Returns the key of the decision whether a whole want waits for a tier."""
    return f"{name} {tier.tier.name}"
