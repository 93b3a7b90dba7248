"""Planner: restores the KV of prompts whose prefix lower tiers have, for one scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import numpy as np

from sgl_ext.clock import Clock
from sgl_ext.planning.channels import Channels, Restoration
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.parts import next_part, plan_of
from sgl_ext.planning.plan import PrefillPlan
from sgl_ext.planning.policies import Policy, soonest
from sgl_ext.planning.request import Request, Restored
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, result_of

_LEASE_S = 60.0
"""Time after which a request that the scheduler no longer looks up is released, in seconds."""
_SEEN_S = 5.0
"""Time for which a request that the scheduler no longer considers blocks others, in seconds."""
_FOLLOWS = 0.5
"""Share of a request's pages from which on it waits for another request that restores them."""


class Planner:
    """Restorations of the requests of a scheduler.

    Only the scheduler's thread calls it, and no method waits for a device.

    Args:
        tiers: tiers below host memory, nearest first.
        page: tokens of a page.
        unit: maximum pages of one load.
        wait: seconds within which tiers have to answer a lookup.
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
    ) -> None:
        self._clock = clock
        self.costs = costs
        self._host = host
        self._tiers = tiers
        self.page = page
        self._wait = wait
        self._hits = hits
        self._channels = Channels(
            tiers, policy, costs, page=page, unit=unit, clock=clock, lock=lock
        )
        self._requests: dict[str, Request] = {}
        self._opened: dict[str, Restoration] = {}
        """Restorations of the requests that hold places in host memory."""
        self._owners: dict[Key, str] = {}
        """Request that restores a page, or is about to, by the key of the page."""
        self._followers: dict[str, tuple[str, float]] = {}
        """Requests that wait for another one with the same prefix: its id, and their arrival."""
        self._first: Restoration | None = None
        """Restoration that is computed next in this step, once chosen."""
        self._chosen = False
        self._unopened: dict[str, Request] = {}
        """Requests that wait for lookups or for places in host memory."""
        self._now = self._clock()
        """Start of this step of the scheduler, on the monotonic clock in seconds."""
        self._before = self._now
        """Start of the previous step."""
        self._epoch = costs.epoch
        self._leases_seen = 0.0
        self.interrupted = 0
        """Number of times that a prompt being computed was interrupted."""
        self._leaving: list[Restoration] = []
        """Restorations that have ended and to whose places a load may still write."""

    def ask(
        self,
        rid: str,
        keys: Sequence[Key],
        here: int,
        first: int,
        prompt_tokens: int,
        precedence: int = 0,
    ) -> None:
        """Looks a request up; its first lookup asks tiers for the pages that host memory lacks.

        Args:
            keys: keys of the pages of the prompt after those that the device has.
            here: number of leading pages that host memory has.
            first: number of the first of these pages in the prompt.
            prompt_tokens: tokens of the prompt.
            precedence: precedence over the policy: a smaller value goes first; may change.
        """
        now = self._clock()
        if (request := self._requests.get(rid)) is not None:
            request.seen = now
            if request.precedence != precedence:
                self._precede(rid, request, precedence)
            return
        _, arrived = self._followers.pop(rid, ("", now))
        if here >= len(keys):
            return
        lacking = keys[here:]
        if (other := self._owners.get(lacking[0])) is not None:
            shared = sum(self._owners.get(key) == other for key in lacking)
            # A request that shares little, such as a system prompt, restores that part again.
            if shared >= _FOLLOWS * len(lacking):
                self._followers[rid] = other, arrived
                return
        lookups = [(tier, tier.lookup(lacking)) for tier in self._tiers]
        if all(one.done() and not result_of(one, 0) for _, one in lookups):
            return
        pinned = self._host.places(keys[:here])
        self._host.pin(pinned)
        request = Request(
            lacking, first + here, prompt_tokens, lookups, pinned, arrived, now, now, precedence
        )
        self._requests[rid] = self._unopened[rid] = request
        for key in lacking:
            self._owners.setdefault(key, rid)
        if len(self._unopened) == 1:  # requests that wait for places come first
            self._open(rid, request)

    def asked(self, rid: str) -> bool:
        """Returns whether tiers below host memory may have pages of the request's prompt."""
        return rid in self._requests or rid in self._followers

    def restores(self, rid: str) -> bool:
        """Returns whether pages of the request's prompt were found and are not released yet."""
        return rid in self._opened

    def loads(self, rid: str) -> bool:
        """Returns whether pages of the request's prompt are being loaded or will be."""
        if (active := self._opened.get(rid)) is None:
            return False
        with self._channels.lock:
            return not active.pointers.settled

    def computes(self, rid: str) -> bool:
        """Returns whether the request is the one whose prompt is being computed."""
        active = self._opened.get(rid)
        return active is not None and active is self._channels.computing

    def turn(self, rid: str, continuing: bool) -> bool:
        """Returns whether a waiting request may be computed now.

        Releases a request whose lookups take too long or that gets no places in host memory; the
        scheduler may then compute it.

        Args:
            continuing: True if another prompt is being computed in parts.
        """
        if (request := self._requests.get(rid)) is None:
            return rid not in self._followers or self._followers[rid][0] not in self._requests
        request.seen = self._now
        if (active := self._opened.get(rid)) is not None and self._chosen:
            return active is self._first and not continuing
        if active is None and not request.answered:
            if self._now < request.asked + self._wait:
                return False
            self.release(rid)
            return True
        if continuing or self._channels.computing is not None:
            return False
        if not self._chosen:
            self._choose()
        if active is None and self._first is None:
            # No request that holds places will release any, so this one takes those that are free.
            self._open(rid, request, scarce=True)
            if (active := self._opened.get(rid)) is None:
                self.release(rid)
                return True
            self._first = active
        return active is not None and self._first is active

    def _precede(self, rid: str, request: Request, precedence: int) -> None:
        request.precedence = precedence
        if (active := self._opened.get(rid)) is not None:
            with self._channels.lock:
                active.precedence = precedence
                self._channels.changed(active)

    def _choose(self) -> None:
        """Chooses the request that is computed next, among those that the scheduler considers."""
        able: Collection[Restoration] = self._opened.values()
        first = soonest(able) if able else None
        if first is not None and not self._sees(first):  # rare: all requests are checked
            able = self._seen()
            first = soonest(able) if able else None
        self._first, self._chosen = first, True

    def _seen(self) -> list[Restoration]:
        return [one for one in self._opened.values() if self._sees(one)]

    def _sees(self, one: Restoration) -> bool:
        """Returns whether the scheduler still considers the request."""
        # Counted from the previous step, because the last forward may have taken long.
        return self._requests[one.rid].seen > self._before - _SEEN_S

    def plan(self, rid: str, begin: int, end: int) -> PrefillPlan | None:
        """Returns the plan of the request's next forward, from token ``begin`` on.

        Args:
            end: tokens of the prompt.

        Returns:
            None if waiting for loads is faster than computing.
        """
        if (active := self._opened.get(rid)) is None:
            return plan_of((), end, self.page)
        pointers, page, now = active.pointers, self.page, self._clock()
        with self._channels.lock:
            if self._channels.computing is not active:
                pointers.front = begin // page
                if not active.reached:
                    active.first = pointers.front
                self._channels.changed(active)
            free, flying = pointers.next_free, pointers.flying
            until = next_part(
                pointers,
                self.costs,
                page,
                flying_for=0.0 if flying is None else now - flying.began,
                busy=0.0 if free is None else self._channels.busy(active, free.tier),
            )
            if until is None:
                return None
            loaded = [*pointers.loaded()]
        return plan_of(loaded, end, page, stop=until if until < pointers.end else None)

    def computing(self, rid: str, until: int) -> None:
        """Records that the next batch has a forward of the request up to token ``until``."""
        if (active := self._opened.get(rid)) is None:
            return
        with self._channels.lock:
            active.pointers.compute(min(-(-until // self.page), active.pointers.end))
            active.reached = until
            self._channels.computing = active
            self._channels.changed(active)

    def preferred(self) -> str | None:
        """Returns the request that should interrupt the one whose prompt is being computed.

        Returns None if there is none, or if the gain in rank is not worth a change.
        """
        computing = self._channels.computing
        if computing is None or not self._channels.interrupts:
            return None
        others = [one for one in self._seen() if one is not computing]
        if not others:
            return None
        first = soonest(others)
        with self._channels.lock:
            for one in (first, computing):  # estimated costs may have changed
                self._channels.changed(one)
        begin = computing.reached
        # Estimates change from part to part; a margin keeps similar requests from alternating.
        worth = self.costs.compute.seconds(begin, begin + self.costs.chunk)
        (urgency, rank), (other_urgency, other_rank) = first.rank, computing.rank
        sooner = rank + worth < other_rank
        return first.rid if (urgency, not sooner) < (other_urgency, True) else None

    def interrupt(self) -> None:
        """Interrupts the prompt that is being computed.

        Its loaded pages stay, and it continues when it is chosen again.
        """
        with self._channels.lock:
            self._channels.computing = None
        self._first, self._chosen = None, False
        self.interrupted += 1

    def places(self, rid: str, begin: int, end: int) -> Pages:
        """Returns the places in host memory of tokens ``begin .. end - 1``, which were loaded."""
        active = self._opened[rid]
        return active.places[begin // self.page - active.begin : end // self.page - active.begin]

    def tiers(self, rid: str, begin: int, end: int) -> Counter[str]:
        """Returns the number of tokens ``begin .. end - 1``, which were loaded, by tier."""
        page, found = self.page, Counter[str]()
        for tier, first, last in self._opened[rid].pointers.regions():
            found[tier] += max(min(end, last * page) - max(begin, first * page), 0)
        return found

    def report(self, rid: str) -> Restored | None:
        """Returns the report of a restoration that is complete; None if there is none."""
        if (active := self._opened.get(rid)) is None:
            return None
        pointers = active.pointers
        came = sum(map(pointers.came, range(active.first, pointers.end)))
        with self._channels.lock:
            loaded = {name: pages * self.page for name, pages in active.loaded.items()}
        computed = max(pointers.end - active.first - came, 0) * self.page
        seconds = self._clock() - active.arrived
        return Restored(loaded=loaded, computed=computed, seconds=seconds)

    def release(self, rid: str) -> None:
        """Ends the restoration of a request that is restored or gone.

        When no load writes to its places any more, they are released, and host memory publishes
        the pages that have landed.
        """
        self._followers.pop(rid, None)
        if (request := self._requests.pop(rid, None)) is None:
            return
        self._unopened.pop(rid, None)
        for key in request.keys:
            if self._owners.get(key) == rid:
                del self._owners[key]
        self._host.unpin(request.pinned)
        if (active := self._opened.pop(rid, None)) is not None:
            if self._first is active:
                self._first, self._chosen = None, False
            with self._channels.lock:
                self._channels.leave(active)
            self._leaving.append(active)
            self._settle()

    def give_up_one(self) -> bool:
        """Releases the newest request that has pinned pages and no restoration yet.

        Its pages can then be evicted. Its next lookup asks tiers again.

        Returns:
            False if there is no such request.
        """
        for rid, request in reversed(self._unopened.items()):
            if len(request.pinned):
                self.release(rid)
                return True
        return False

    def advance(self) -> None:
        """Advances all restorations without waiting; called once per scheduler step."""
        self._before, self._now = self._now, (now := self._clock())
        if self._epoch != self.costs.epoch:
            self._epoch = self.costs.epoch
            with self._channels.lock:
                for active in self._opened.values():
                    self._channels.changed(active)
        self._first, self._chosen = None, self._channels.computing is not None
        self._settle()
        for rid, request in list(self._unopened.items()):
            self._open(rid, request)
            if request.answered and rid in self._unopened:
                break  # it waits for places, which later requests must not take
        if now > self._leases_seen + _SEEN_S:
            self._leases_seen = now
            for rid, request in list(self._requests.items()):
                if self._before > request.seen + _LEASE_S and not self.computes(rid):
                    self.release(rid)

    def pending(self) -> bool:
        """Returns whether any request is being restored or looked up."""
        return bool(self._requests)

    def clear(self) -> list[str]:
        """Releases all requests and returns their ids."""
        rids = list(self._requests)
        for rid in rids:
            self.release(rid)
        return rids

    def close(self) -> None:
        self._channels.close()
        self.clear()

    def check_integrity(self) -> None:
        """Checks the lists of requests against each other, channels and host memory. O(pages).

        Raises:
            AssertionError: a list has a request that another one lacks, the channels contradict
                themselves, or host memory has fewer pins or reservations than the requests own.
        """
        requests, opened = {*self._requests}, {*self._opened}
        if opened & {*self._unopened} or opened | {*self._unopened} != requests:
            raise AssertionError(f"{opened} and {[*self._unopened]} are not {requests}")
        if not {*self._owners.values()} <= requests:
            raise AssertionError(f"{ {*self._owners.values()} - requests } own pages, and are gone")
        if requests & {*self._followers}:
            raise AssertionError(f"{requests & {*self._followers}} restore and follow")
        computing = self._channels.computing
        if computing is not None and self._opened.get(computing.rid) is not computing:
            raise AssertionError(f"{computing.rid} is computed, and is not being restored")
        every = [*self._opened.values(), *self._leaving]
        self._channels.check_integrity(every)
        self._host.check_integrity(
            [request.pinned for request in self._requests.values()], [one.places for one in every]
        )

    def _open(self, rid: str, request: Request, *, scarce: bool = False) -> None:
        """Begins the restoration of a request if tiers have answered and there are places for it.

        Releases a request of which tiers have nothing.

        Args:
            scarce: True to accept fewer places than the pages need.
        """
        if request.nothing:
            self.release(rid)
        elif (active := request.open(rid, self._host, scarce=scarce)) is not None:
            del self._unopened[rid]
            self._opened[rid] = active
            with self._channels.lock:
                self._channels.changed(active)

    def _settle(self) -> None:
        """Publishes landed pages of ended restorations and releases their other places."""
        with self._channels.lock:
            over = [one for one in self._leaving if not self._channels.flying(one)]
        for one in over:
            self._leaving.remove(one)
            came = np.array(
                [one.pointers.came(page) for page in range(one.begin, one.pointers.end)], bool
            )
            self._host.publish(
                [key for key, good in zip(one.keys, came, strict=True) if good], one.places[came]
            )
            self._host.release(one.places[~came])
            self._hits.update(one.loaded)
