"""Swap manager: keeps the KV of preempted requests in host memory (FastSwitch §3.3).

The whole pages of a preempted request are ordinary pages of the tier stack. The stack stores the
pages that it does not have from earlier turns or from requests with the same prefix, and finds them
by key. The swap manager pins them, up to its budget, so that they are present when the request
resumes. Only a partial last page, which has no key, is kept separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from sgl_ext.config import SwapExperiment
from sgl_ext.memory.tickets import State, Ticket
from sgl_ext.swap.stopwatch import Stopwatch
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack
from sgl_ext.tiers.stores import Saved

_NOT_PINNED = -1
_PRESSURE = 0.5
"""Share of the budget from which on pages of swapped requests are stored in lower tiers, too."""


@dataclass(eq=False)
class Swapped:
    """Preempted request and its pages in host memory.

    Attributes:
        tokens: tokens of the request that had KV.
        keys: keys of its whole pages.
        tail: copy of its partial last page; None if there is no such page or no room for it.
    """

    tokens: int
    keys: Sequence[Key]
    tail: Saved | None
    places: Pages = field(init=False)
    """Places of the pinned whole pages in host memory, ``[len(keys)]``; -1 if not pinned."""

    coming: Pages | None = None
    """Places of the pages that are about to be loaded; None if none are held."""

    def __post_init__(self) -> None:
        self.places = np.full(len(self.keys), _NOT_PINNED, np.int64)


@dataclass
class Counts:
    """Counters since the start."""

    swapped_out: int = 0
    """Requests that were swapped out."""
    swapped_in: int = 0
    recomputed: int = 0
    """Preempted requests that were recomputed, at least in part."""
    recomputed_tokens: int = 0
    loaded_pages: int = 0
    """Pages that were loaded from host memory for resumed requests."""
    tails: int = 0
    """Partial pages that were copied to host memory."""
    loading_seconds: float = 0.0
    """Seconds for which the scheduler waited for the KV of resumed requests."""
    copied_again: int = 0
    """Pages that were copied although host memory already had them."""


class SwapManager:
    """Swapped requests of a scheduler, whose thread is the only caller.

    Args:
        capacity: maximum pages of host memory for swapped requests.
        experiment: parts of swapping that are replaced by slower ones, for comparison.
    """

    def __init__(self, stack: TierStack, capacity: int, experiment: SwapExperiment) -> None:
        self.experiment = experiment
        self.stack = stack
        self.counts = Counts()
        self.clock = Stopwatch(lambda: stack.in_flight.waited_seconds)
        """Time that the scheduler's thread spends on swapping, without its waits."""
        self.spills = True
        """Whether pages go on to lower tiers when half of the budget is used."""
        self._capacity = capacity
        self._used = 0
        self._swapped: dict[str, Swapped] = {}
        self._landing: list[Swapped] = []
        """Requests that may have pages to pin: pages that host memory has not received yet, or that
        exceeded the budget."""
        self._tails: list[Swapped] = []
        """Requests whose partial last page is being copied to host memory."""
        self._ended = 0

    def __contains__(self, rid: str) -> bool:
        return rid in self._swapped

    def get(self, rid: str) -> Swapped | None:
        return self._swapped.get(rid)

    def save_tail(self, block: int) -> Saved | None:
        """Begins to copy a partial page to host memory.

        Returns:
            The copy; None if there is no room for it.
        """
        if self._used >= self._capacity:
            return None
        if (saved := self.stack.stores.save(np.array([block]))) is not None:
            self._used += 1
            self.counts.tails += 1
        return saved

    def out(self, rid: str, tokens: int, keys: Sequence[Key], tail: Saved | None) -> None:
        """Records a preempted request, whose whole pages are stored or about to be."""
        self.drop(rid)
        self._swapped[rid] = swapped = Swapped(tokens, keys, tail)
        self.counts.swapped_out += 1
        self._landing.append(swapped)
        if tail is not None:
            self._tails.append(swapped)
        self._pin(swapped)

    def advance(self) -> bool:
        """Pins pages that host memory has received; called at least once per scheduler step.

        Returns:
            Whether more pages of swapped requests may be readable now.
        """
        tails = [one for one in self._tails if one.tail is None or not one.tail.ticket.poll()]
        news = self._ended != self.stack.stores.ended or len(tails) < len(self._tails)
        self._tails, self._ended = tails, self.stack.stores.ended
        if self._landing and self._used < self._capacity:
            for swapped in self._landing:
                self._pin(swapped)
            if not self.stack.stores.in_progress and self._used < self._capacity:
                self._landing.clear()
        return bool(self._swapped) and news

    def readable(self, swapped: Swapped, first: int) -> bool | None:
        """Returns whether all pages of the request from number ``first`` on can be read.

        Returns:
            True if all can be read; None if some are still being copied to host memory; False if
            some are lost.
        """
        if not self.stack.enabled:  # the weights have changed, so the stored KV is invalid
            return False
        keys, tail = swapped.keys[first:], swapped.tail
        if swapped.tokens > len(swapped.keys) * self.stack.layout.page:
            if tail is None or (tail.ticket.poll() and tail.ticket.state != State.DONE):
                return False
            if not tail.ticket.poll():
                return None
        there = self.stack.host.lookup(keys)
        if there == len(keys):
            return True
        return None if self.stack.stores.storing(keys[there]) else False

    def hold(self, swapped: Swapped, first: int) -> None:
        """Pins the request's whole pages from number ``first`` on until :meth:`let_go` or
        :meth:`drop`. All of them must be readable."""
        swapped.coming = self.stack.host.use(swapped.keys[first:])
        self.stack.host.pin(swapped.coming)

    def load(self, swapped: Swapped, blocks: Pages) -> list[Ticket]:
        """Begins to copy the held pages and the partial last page into ``blocks`` of the device.

        Returns:
            Tickets to wait for.

        Raises:
            RuntimeError: no pages are held.
        """
        pages = swapped.coming
        if pages is None:
            raise RuntimeError("cannot load pages, because none are held")
        tickets = []
        if len(pages):
            tickets.append(self.stack.holds.begin_fill(pages, blocks[: len(pages)]))
        if swapped.tail is not None:
            tickets.append(self.stack.holds.begin_fill(swapped.tail.pages, blocks[len(pages) :]))
        self.counts.loaded_pages += len(blocks)
        return tickets

    def let_go(self, swapped: Swapped | None) -> None:
        """Unpins held pages, which were loaded or will not be."""
        if swapped is not None and swapped.coming is not None:
            self.stack.holds.let_go(swapped.coming)
            swapped.coming = None

    def copy_again(self, keys: Sequence[Key], blocks: Pages) -> None:
        """Copies ``blocks`` of the device to the pages of ``keys`` that host memory already has."""
        missing = set(self.stack.host.missing(keys))
        here = [at for at in range(len(keys)) if at not in missing]
        self.stack.stores.copy_again([keys[at] for at in here], blocks[here])
        self.counts.copied_again += len(here)

    def drop(self, rid: str) -> None:
        """Forgets a request that runs again or is gone, and unpins its pages."""
        if (swapped := self._swapped.pop(rid, None)) is None:
            return
        self.let_go(swapped)
        pinned = swapped.places[swapped.places != _NOT_PINNED]
        self.stack.holds.let_go(pinned)
        self._used -= len(pinned)
        if swapped.tail is not None:
            self.stack.stores.drop(swapped.tail)
            self._used -= 1
        for those in (self._landing, self._tails):
            if swapped in those:
                those.remove(swapped)

    def give_up_one(self) -> bool:
        """Unpins the pages of the newest swapped request whose pages lower tiers have, too.

        Returns:
            False if there is no such request.
        """
        for swapped in reversed(self._swapped.values()):
            pinned = swapped.places != _NOT_PINNED
            places = swapped.places[pinned]
            if swapped.coming is None and len(places) and self.stack.host.copied(places).all():
                self.stack.holds.let_go(places)
                swapped.places[pinned] = _NOT_PINNED
                self._used -= len(places)
                if swapped in self._landing:
                    self._landing.remove(swapped)
                return True
        return False

    def clear(self) -> list[str]:
        """Forgets all requests, and returns their ids."""
        rids = list(self._swapped)
        for rid in rids:
            self.drop(rid)
        return rids

    def describe(self) -> dict[str, int | float]:
        """Returns the statistics for ``/server_info``."""
        flight = self.stack.in_flight
        return {
            **asdict(self.counts),
            "swapped": len(self._swapped),
            "stored_pages": self.stack.stores.traffic.pages,
            "stored_bytes": self.stack.stores.traffic.pages * self.stack.layout.block_bytes,
            "busy_seconds": self.clock.seconds,
            "waits": flight.waited,
            "waiting_seconds": flight.waited_seconds,
        }

    def check_integrity(self) -> None:
        """Checks the budget and the lists against the swapped requests. O(pages).

        Call it between operations: a page of :meth:`save_tail` counts before :meth:`out`.

        Raises:
            AssertionError: the budget is exceeded or counted wrongly, a pinned page is not where
                host memory has it, or a list has a request that is not swapped.
        """
        used = 0
        for rid, one in self._swapped.items():
            pinned = np.flatnonzero(one.places != _NOT_PINNED).tolist()
            used += len(pinned) + (one.tail is not None)
            keys = [one.keys[at] for at in pinned]
            if self.stack.host.missing(keys):
                raise AssertionError(f"{rid} has pinned pages that host memory lacks")
            places = self.stack.host.places(keys)
            if places.tolist() != one.places[pinned].tolist():
                raise AssertionError(f"{rid} has pinned {one.places}, its pages lie in {places}")
        if used != self._used or used > self._capacity:
            raise AssertionError(
                f"{used} pages are in use, {self._used} are counted, of {self._capacity}"
            )
        known = {id(one) for one in self._swapped.values()}
        if not {id(one) for one in (*self._landing, *self._tails)} <= known:
            raise AssertionError("a request that is not swapped awaits copies")

    def _pin(self, swapped: Swapped) -> None:
        room = self._capacity - self._used
        lacking = np.flatnonzero(swapped.places == _NOT_PINNED).tolist()
        here = {swapped.keys[at]: at for at in lacking}
        present = self.stack.host.present(here)
        keys = present[:room]
        places = self.stack.host.places(keys)
        self.stack.host.pin(places)
        swapped.places[[here[key] for key in keys]] = places
        self._used += len(keys)
        if self.spills and self._used > _PRESSURE * self._capacity:
            # The request will read them, unless it is aborted; host memory may lack room before.
            self.stack.keep(present)
