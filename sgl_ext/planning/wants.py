"""Registry of the wants of a scheduler: lookups, places, loads, and their end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clock import Clock
from sgl_ext.planning.channels import Channels, Restoration
from sgl_ext.planning.request import NOWHERE, Request
from sgl_ext.planning.want import Name, Positions, Want
from sgl_ext.tiers.arena import Key
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, result_of
from sgl_ext.tiers.tier import leading

_LEASE_S = 60.0
"""Time after which a want that the scheduler no longer looks up is released, in seconds."""
_ABSENT_S = 5.0
"""Time for which an answer counts that tiers have no page of a want, in seconds."""
_CHECKED_S = 5.0
"""Seconds between two checks of the leases."""
_FOLLOWS = 0.5
"""Share of a run's missing pages from which on a want waits for another one that loads them."""
_TRIED = 16
"""Maximum number of wants whose lookups are examined in a step."""


class Wants:
    """Wants of the requests of a scheduler, whose thread is the only caller.

    A want waits for lookups and for places, is open while tiers load its pages, and, if it is
    loaded as a whole, rests with its pages pinned until it is released.

    Args:
        tiers: tiers below host memory, nearest first.
        unit: maximum pages of one load, of a want that is not loaded as a whole.
        spare: places of host memory that wants leave free for others.
        hits: counter of loaded pages by tier, which this object updates for wants that are not
            loaded as a whole.
        clock: clock of arrivals and leases.
    """

    def __init__(
        self,
        host: HostPages,
        tiers: Sequence[LowerTier],
        channels: Channels,
        *,
        page: int,
        unit: int,
        spare: int,
        hits: Counter[str],
        clock: Clock,
    ) -> None:
        self.page = page
        self._host = host
        self._tiers = tiers
        self._channels = channels
        self._unit = unit
        self._spare = spare
        self._hits = hits
        self._clock = clock
        self.requests: dict[Name, Request] = {}
        self.opened: dict[Name, Restoration] = {}
        """Restorations of the wants that hold places in host memory."""
        self.unopened: dict[Name, Request] = {}
        """Wants that wait for lookups or for places in host memory."""
        self._owners: dict[Key, Name] = {}
        """Want that loads a page, or is about to, by the key of the page."""
        self._followers: dict[Name, tuple[Name, float]] = {}
        """Wants that wait for another one with the same pages: its name, and their arrival."""
        self._absent: dict[Name, tuple[Key, float]] = {}
        """Wants of which all asked tiers have nothing: first lacking page, and time of the answer.
        SGLang looks waiting requests up in each step; they must not be asked for again each time.
        """
        self.leaving: list[Restoration] = []
        """Restorations that have ended and to whose places a load may still write."""
        self._checked = 0.0

    def __contains__(self, name: Name) -> bool:
        """Returns whether tiers below host memory may have pages of a want."""
        return name in self.requests or name in self._followers

    def follows(self, name: Name) -> bool:
        """Returns whether a want waits for another one, which loads the same pages."""
        followed = self._followers.get(name)
        return followed is not None and self._loads(followed[0])

    def ask(self, want: Want, *, whole: bool, tiers: Sequence[LowerTier] | None = None) -> None:
        """Looks a want up; its first lookup asks tiers for the pages that host memory lacks.

        Args:
            whole: whether all pages are loaded before anything is computed.
            tiers: tiers to ask; None for all.
        """
        now, name = self._clock(), want.name
        if (request := self.requests.get(name)) is not None:
            request.seen = now
            if request.want.precedence != want.precedence:
                self._precede(request, want)
            return
        _, arrived = self._followers.pop(name, (None, now))
        runs = [run.keys[run.here :] for run in want.runs]
        first, answered = self._absent.get(name, (None, -math.inf))
        if now <= answered + _ABSENT_S and first == next(filter(None, runs), [None])[0]:
            return
        for lacking in filter(None, runs):
            # A want that shares little, such as a system prompt, loads that part again; also one
            # that is more urgent, because the other one's request may have to wait for memory.
            other = self._owners.get(lacking[0])
            if other is not None and self._loads(other) and not self._precedes(want, other):
                shared = sum(self._owners.get(key) == other for key in lacking)
                if shared >= _FOLLOWS * len(lacking):
                    self._followers[name] = other, arrived
                    return
        keys: list[Key] = []
        lookups = []
        for lacking in runs:
            asked = (tiers or self._tiers) if lacking else ()
            lookups.append((len(keys), [(tier, tier.lookup(lacking)) for tier in asked]))
            keys += lacking
        if all(one.done() and not result_of(one, 0) for _, each in lookups for _, one in each):
            return
        here = [key for run in want.runs for key in run.keys[: run.here]]
        pinned = self._host.places([*dict.fromkeys(here)])  # a page may occur in two runs
        self._host.pin(pinned)
        request = Request(
            want, whole, keys, self._positions(want), lookups, pinned, arrived, now, now
        )
        self.requests[name] = self.unopened[name] = request
        for key in keys:
            self._owners.setdefault(key, name)
        if len(self.unopened) == 1:  # wants that wait for places come first
            self.open(request)

    def _positions(self, want: Want) -> Positions:
        page = self.page
        starts = [
            range(run.start + run.here * page, run.start + len(run.keys) * page, page)
            for run in want.runs
        ]
        if len(starts) == 1:
            return Positions(starts[0], page)
        # The pages of two runs may overlap where one ends and the other begins.
        every = zip(want.runs, starts, strict=True)
        return Positions([max(start, run.least) for run, pages in every for start in pages], page)

    def _precede(self, request: Request, want: Want) -> None:
        request.want = replace(request.want, precedence=want.precedence)
        if (active := self.opened.get(want.name)) is not None:
            with self._channels.lock:
                active.precedence = want.precedence
                self._channels.changed(active)

    def _precedes(self, want: Want, name: Name) -> bool:
        """Returns whether a want is more urgent than another one, which loads."""
        return want.precedence < self.requests[name].want.precedence

    def _loads(self, name: Name) -> bool:
        return name in self.unopened or name in self.opened

    def open(self, request: Request, *, scarce: bool = False) -> Restoration | None:
        """Begins the loads of a want if tiers have answered and there are places for it.

        Releases a want of which tiers have nothing.

        Args:
            scarce: True to accept fewer places than the pages need; a whole want always does.
        """
        name = request.want.name
        if request.nothing:
            self.release(name)
            self._absent[name] = request.keys[0], self._clock()
            return None
        # A want's own pinned pages count towards the spare places: it must not wait for itself.
        room = max(min(self._host.room, self._host.room + len(request.pinned) - self._spare), 0)
        scarce = scarce or request.whole
        active = request.open(self._host, room, self._unit, scarce=scarce)
        if active is not None:
            del self.unopened[name]
            self.opened[name] = active
            with self._channels.lock:
                self._channels.changed(active)
        return active

    def release(self, name: Name) -> Request | None:
        """Ends a want whose pages are not needed any more, and returns it.

        When no load writes to its places any more, they are released, and host memory publishes
        the pages that have landed.
        """
        self._followers.pop(name, None)
        self._absent.pop(name, None)
        if (request := self.requests.pop(name, None)) is None:
            return None
        self.unopened.pop(name, None)
        self._disown(request)
        self._host.unpin(request.pinned)
        if (active := self.opened.pop(name, None)) is not None:
            with self._channels.lock:
                self._channels.leave(active)
            self.leaving.append(active)
            self._settle()
        return request

    def _disown(self, request: Request) -> None:
        for key in request.keys:
            if self._owners.get(key) == request.want.name:
                del self._owners[key]

    def keeping(self) -> Iterator[Name]:
        """Yields the wants that pin pages of host memory and can be given up, the newest first."""
        for name, request in reversed(self.requests.items()):
            if len(request.pinned) and (request.whole or name in self.unopened):
                yield name

    def advance(self) -> None:
        """Takes every step that needs no waiting; called once per scheduler step."""
        self._settle()
        if self._channels.ended:
            self._finish()
        for name, request in [*islice(self.unopened.items(), _TRIED)]:
            self.open(request)
            if request.answered and name in self.unopened:
                break  # it waits for places, which later wants must not take
        now = self._clock()
        if now > self._checked + _CHECKED_S:
            self._checked = now
            computing = self._channels.computing
            for name, request in [*self.requests.items()]:
                computes = computing is not None and computing.name == name
                if now > request.seen + _LEASE_S and not computes:
                    self.release(name)
            for name, (_, answered) in [*self._absent.items()]:
                if now > answered + _ABSENT_S:
                    del self._absent[name]
            for name, (other, arrived) in [*self._followers.items()]:
                if now > arrived + _LEASE_S and not self._loads(other):
                    del self._followers[name]

    def pending(self) -> bool:
        """Returns whether any want waits or is being loaded."""
        return bool(self.unopened or self.opened)

    def clear(self) -> list[Name]:
        """Releases all wants and returns their names."""
        names = [*self.requests]
        for name in names:
            self.release(name)
        self._followers.clear()
        self._absent.clear()
        return names

    def _finish(self) -> None:
        """Publishes and pins the pages of whole wants whose loads have ended."""
        with self._channels.lock:
            ended, self._channels.ended = self._channels.ended, []
        for one in ended:
            request = self.requests[one.name]
            del self.opened[one.name]
            self._disown(request)
            with self._channels.lock:
                self._channels.leave(one)
            kept = self._first_pages(request, one)
            for tier, first, end in one.pointers.regions():
                if count := int(np.count_nonzero(kept[first:end])):
                    request.landed[tier] = request.landed.get(tier, 0) + count
            names = self._publish(one, kept)
            # Texts that share pages may have a page in two runs, one of which was here already.
            pinned = np.setdiff1d(self._host.places(names), request.pinned)
            self._host.pin(pinned)
            request.pinned = np.concatenate((request.pinned, pinned))
            request.seconds = self._clock() - request.asked

    def _first_pages(self, request: Request, one: Restoration) -> NDArray[np.bool_]:
        """Returns a mask of the loaded pages before the first gap of each run."""
        came = _came(one)
        kept = np.zeros(len(came), bool)
        firsts = [first for first, _ in request.lookups]
        for first, end in zip(firsts, [*firsts[1:], len(came)], strict=True):
            kept[first : first + leading(came[first:end])] = True
        return kept

    def _settle(self) -> None:
        """Publishes landed pages of ended restorations and releases their other places."""
        with self._channels.lock:
            over = [one for one in self.leaving if not self._channels.flying(one)]
        for one in over:
            self.leaving.remove(one)
            self._publish(one, _came(one))
            if not one.whole:
                self._hits.update(one.loaded)

    def _publish(self, one: Restoration, kept: NDArray[np.bool_]) -> Sequence[Key]:
        """Publishes some pages of a restoration, and releases its other places."""
        numbers = {one.keys[at]: at for at in np.flatnonzero(kept)[::-1].tolist()}
        once = np.fromiter(numbers.values(), np.int64, len(numbers))[::-1]  # a text may occur twice
        names = [one.keys[at] for at in once.tolist()]
        self._host.publish(names, one.places[once])
        held = one.places != NOWHERE
        held[once] = False
        self._host.release(one.places[held])
        return names

    def check_integrity(self) -> None:
        """Checks the lists of wants against each other, channels and host memory. O(pages).

        Raises:
            AssertionError: a list has a want that another one lacks, the channels contradict
                themselves, or host memory has fewer pins or reservations than the wants own.
        """
        requests, opened = {*self.requests}, {*self.opened}
        rest = requests - opened - {*self.unopened}
        if opened & {*self.unopened} or not opened | {*self.unopened} <= requests:
            raise AssertionError(f"{opened} and {[*self.unopened]} are not among {requests}")
        if any(not self.requests[name].whole for name in rest):
            raise AssertionError(f"{rest} neither wait nor load")
        if not {*self._owners.values()} <= {*self.unopened} | opened:
            raise AssertionError(
                f"{ {*self._owners.values()} - opened } own pages, and do not load"
            )
        for request in self.requests.values():
            starts = [*map(request.at.start, range(len(request.keys)))]
            if starts != sorted(starts):
                raise AssertionError(f"the pages of {request.want} are not in order: {starts}")
        if requests & {*self._followers}:
            raise AssertionError(f"{requests & {*self._followers}} load and follow")
        computing = self._channels.computing
        if computing is not None and self.opened.get(computing.name) is not computing:
            raise AssertionError(f"{computing.name} is computed, and is not being restored")
        every = [*self.opened.values(), *self.leaving]
        self._channels.check_integrity(every)
        self._host.check_integrity(
            [request.pinned for request in self.requests.values()],
            [one.places[one.places != NOWHERE] for one in every],
        )


def _came(one: Restoration) -> NDArray[np.bool_]:
    """Returns a mask of the pages that have landed."""
    return np.array([one.pointers.came(page) for page in range(one.pointers.end)], bool)
