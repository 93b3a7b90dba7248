"""I/O channels of the tiers, which load the pages of wants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clock import Clock
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.parts import Part
from sgl_ext.planning.pointers import Pointers
from sgl_ext.planning.policies import Policy
from sgl_ext.planning.want import Name, Positions
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.lower import LowerTier

LOAD_TOKENS = 128
"""Maximum tokens of one load; a load has one page at least."""
_PATIENCE_S = 0.5
"""Seconds that a load may be late, in addition to its expected duration."""


def load_unit(page: int) -> int:
    """Returns the maximum pages of one load of a want of which a part is computed.

    Args:
        page: tokens of a page.
    """
    return max(LOAD_TOKENS // page, 1)


@dataclass(eq=False, slots=True)
class Restoration:
    """Want whose pages are loaded; implements :class:`~sgl_ext.planning.policies.Candidate`."""

    name: Name
    arrived: float
    prompt_tokens: int
    """Tokens of the prompt."""
    pointers: Pointers
    at: Positions
    """Positions of the pages in the prompt."""
    keys: Sequence[Key]
    places: Pages
    """Places in host memory that are held for the pages, -1 for those that are not loaded."""
    precedence: int
    """Precedence over the policy: a want with a smaller value goes first."""
    unit: int
    """Maximum pages of one load."""
    whole: bool = False
    """Whether all pages are loaded before anything is computed."""
    position: int = 0
    """First token of the prompt that is not computed or about to be."""
    first: int = 0
    """First page that the restoration covers."""
    remaining: float = 0.0
    recomputing: float = 0.0
    rank: tuple[int, float] = (0, 0.0)
    """Precedence, then the rank that the policy gives."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Loaded pages, by tier."""
    reached: int = 0
    """Tokens of the prompt that are computed or loaded; 0 until a first part is planned."""
    part: Part | None = None
    """Part that was planned last; None if none was, or waiting was better."""
    gone: bool = False

    def estimate(self, costs: Costs) -> None:
        """Updates :attr:`remaining` and :attr:`recomputing`, from which policies choose."""
        free, front = [*self.pointers.free], self.position
        back = self.at.end(free[-1].end) if free else front
        # Tiers load in parallel: the tier with the most pages left determines the time.
        tiers = [each.tier for each in free] or [self.pointers.stretches[0].tier]
        tier = max(tiers, key=self.pointers.left)
        self.recomputing = costs.recomputing(front, back)
        end = max(self.at.end(self.pointers.end), self.reached)
        self.remaining = costs.remaining(front, back, end, self.prompt_tokens, tier)


class Channels:
    """I/O channels of the tiers, one per tier. A load transfers a few pages of one request.

    When a load has ended, the thread of its tier begins the next one, independently of the
    scheduler.

    Args:
        page: tokens of a page.
        clock: clock of the start of each load.
        lock: protects the state of this object and the pointers of the requests; never held while
            waiting.

    Attributes:
        computing: want of the request whose prompt is being computed.
        ended: whole wants of which all pages have landed or failed, until they are taken out.
    """

    def __init__(
        self,
        tiers: Sequence[LowerTier],
        policy: Policy,
        costs: Costs,
        *,
        page: int,
        clock: Clock,
        lock: AbstractContextManager[object],
    ) -> None:
        self._clock = clock
        self.lock = lock
        self.computing: Restoration | None = None
        self.ended: list[Restoration] = []
        self._tiers = {tier.tier.name: tier for tier in tiers}
        self._policy = policy
        self._costs = costs
        self._page = page
        self._able: dict[str, dict[Name, Restoration]] = {name: {} for name in self._tiers}
        self._loading: dict[str, Restoration] = {}
        self._closed = False

    @property
    def interrupts(self) -> bool:
        """Returns whether a request that ranks first interrupts a prompt that is being computed."""
        return self._policy.interrupts

    def changed(self, one: Restoration) -> None:
        """Updates a request that is new or whose pointers have moved, and begins loads.

        The caller holds the lock.
        """
        self._note(one)
        for stretch in one.pointers.stretches:
            self._next(stretch.tier)

    def leave(self, one: Restoration) -> None:
        """Stops loading for a request; loads in flight still complete.

        The caller holds the lock.
        """
        one.gone = True
        self._note(one)
        if self.computing is one:
            self.computing = None
        if one in self.ended:
            self.ended.remove(one)

    def flying(self, one: Restoration) -> bool:
        """Returns whether a load may still write to the request's places.

        The caller holds the lock.
        """
        return any(each is one for each in self._loading.values())

    def busy(self, one: Restoration, tier: str) -> float:
        """Returns the seconds until the channel begins its next load for the request.

        Returns infinity if, as far as can be predicted, the channel does not load for the request
        next. The caller holds the lock.
        """
        able = self._able[tier]
        if able.get(one.name) is not one:
            return inf
        if self._policy.load(able.values(), self.computing) is not one:
            return inf
        if (current := self._loading.get(tier)) is None:
            return 0.0
        if (stretch := current.pointers.load(tier)) is None:
            return 0.0
        expected = self._costs.loads[tier].seconds(stretch.flying * self._page)
        late = self._clock() - stretch.began - expected
        # A device that is this late may hang, so its next load is not waited for.
        return inf if late > expected + _PATIENCE_S else max(-late, 0.0)

    def close(self) -> None:
        """Stops all channels: no further load begins."""
        with self.lock:
            self._closed = True
            for able in self._able.values():
                able.clear()

    def check_integrity(self, every: Collection[Restoration]) -> None:
        """Checks the loads in flight and the lists of requests against the pointers. O(pages).

        Args:
            every: requests that are being restored, and those that have left with loads in flight.

        Raises:
            AssertionError: a load in flight is not that of its request's pointers, a channel lacks
                a request that it can load for or has one that it cannot, or more pages have landed
                than were loaded.
        """
        with self.lock:
            flying = {
                stretch.tier: one for one in every for stretch in one.pointers.stretches
                if stretch.flying
            }  # fmt: skip
            if flying != self._loading:
                raise AssertionError(
                    f"channels load for {_names(self._loading)}, pointers for {_names(flying)}"
                )
            for name, able in self._able.items():
                wanted = {
                    one.name: one for one in every if not one.gone and one.pointers.left(name)
                }
                if able != wanted and not self._closed:
                    raise AssertionError(f"{name} loads for {[*able]}, not for {[*wanted]}")
            for one in every:
                landed = sum(map(one.pointers.came, range(one.pointers.end)))
                if not landed <= sum(one.loaded.values()) <= len(one.keys):
                    raise AssertionError(
                        f"{one.name} has {landed} landed pages of {len(one.keys)}, and counts "
                        f"{one.loaded}"
                    )

    def _next(self, name: str) -> None:
        """Begins the next load of a tier that has none in flight.

        The caller holds the lock.
        """
        able = self._able[name]
        while able and name not in self._loading and not self._closed:
            one = self._policy.load(able.values(), self.computing)
            taken = one.pointers.take(name, one.unit, self._clock())
            self._note(one)
            if taken is None:
                able.pop(one.name, None)
                continue
            begin, end = taken
            self._loading[name] = one
            then = partial(self._landed, name, one)
            self._tiers[name].load_then(one.keys[begin:end], one.places[begin:end], then)

    def _landed(self, name: str, one: Restoration, good: NDArray[np.bool_], seconds: float) -> None:
        """Records a finished load and begins the next one, in the tier's thread."""
        with self.lock:
            del self._loading[name]
            used = one.pointers.land(name, good.tolist())
            if good.any():
                self._costs.loaded(name, len(good) * self._page, seconds)
                one.loaded[name] = one.loaded.get(name, 0) + used
            self._note(one)
            if one.whole and not one.gone and one.pointers.settled:
                self.ended.append(one)
            self._next(name)

    def _note(self, one: Restoration) -> None:
        """Updates the request's estimates and rank, and the tiers that can load pages for it."""
        one.estimate(self._costs)
        one.rank = one.precedence, self._policy.rank(one)
        for stretch in one.pointers.stretches:
            able = self._able[stretch.tier]
            if not one.gone and one.pointers.left(stretch.tier):
                able[one.name] = one
            elif able.get(one.name) is one:  # not a later request with the same id
                del able[one.name]


def _names(loading: Mapping[str, Restoration]) -> dict[str, Name]:
    return {tier: one.name for tier, one in loading.items()}
