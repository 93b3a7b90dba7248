"""The I/O channels of the tiers: what each loads next for the requests that are restored."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from sgl_ext.restore.costs import Costs
from sgl_ext.restore.pointers import Pointers
from sgl_ext.restore.policies import Policy
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.lower import LowerTier

_PATIENCE_S = 0.5
"""That a load may be late, beside the time that it should take."""


@dataclass(eq=False, slots=True)
class Restoration:
    """A request that is restored; a :class:`~sgl_ext.restore.policies.Candidate`.

    Pages are numbered as in its prompt.
    """

    rid: str
    arrived: float
    behind: int
    """Tokens of its prompt."""
    pointers: Pointers
    first: int
    """Page that computing has begun with."""
    begin: int
    """The first page of :attr:`keys` and :attr:`places`."""
    keys: Sequence[Key]
    places: Pages
    """In host memory, held: what is loaded lands there."""
    precedence: int
    """The smaller, the sooner, whatever the policy says of others."""
    remaining: float = 0.0
    recomputing: float = 0.0
    rank: tuple[int, float] = (0, 0.0)
    """Its precedence, and what the policy says."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Pages, by tier."""
    reached: int = 0
    """Tokens of its prompt that were computed or loaded, once a part was computed."""
    gone: bool = False

    def estimate(self, costs: Costs, page: int) -> None:
        """What is left to do, for policies."""
        free, front = [*self.pointers.free], self.pointers.front * page
        back = free[-1].end * page if free else front
        # Tiers load at the same time: what the one with most left takes is what remains.
        tiers = [each.tier for each in free] or [self.pointers.stretches[0].tier]
        tier = max(tiers, key=self.pointers.left)
        self.recomputing = costs.recomputing(front, back)
        end = max(self.pointers.end * page, self.reached)
        self.remaining = costs.remaining(front, back, end, self.behind, tier)


class Channels:
    """One channel for each tier; a load is a few pages of one request.

    When a load has ended, the thread of its tier begins the next one, whatever the scheduler is
    doing meanwhile.

    Args:
        page: tokens.
        unit: pages of one load, at most: the smaller, the closer pointers meet.

    Attributes:
        lock: of everything here, and of the pointers of the requests; never held while waiting.
        computing: the request whose prompt is being computed.
    """

    def __init__(
        self, tiers: Sequence[LowerTier], policy: Policy, costs: Costs, *, page: int, unit: int
    ) -> None:
        self.lock = threading.Lock()
        self.computing: Restoration | None = None
        self._tiers = {tier.tier.name: tier for tier in tiers}
        self._policy = policy
        self._costs = costs
        self._page = page
        self._unit = unit
        self._able: dict[str, dict[str, Restoration]] = {name: {} for name in self._tiers}
        self._loading: dict[str, Restoration] = {}
        self._closed = False

    @property
    def interrupts(self) -> bool:
        """Whether a prompt that is being computed gives way to one that comes before it."""
        return self._policy.interrupts

    def changed(self, one: Restoration) -> None:
        """Its pointers have moved, or it has just come. With the lock held."""
        self._note(one)
        for stretch in one.pointers.stretches:
            self._next(stretch.tier)

    def leave(self, one: Restoration) -> None:
        """Nothing more is loaded for it; what is on its way lands. With the lock held."""
        one.gone = True
        self._note(one)
        if self.computing is one:
            self.computing = None

    def flying(self, one: Restoration) -> bool:
        """Whether something may still land in its places. With the lock held."""
        return any(each is one for each in self._loading.values())

    def busy(self, one: Restoration, tier: str) -> float:
        """Seconds until the channel turns to the request, or does again; infinite if it does not,
        as far as can be told. With the lock held."""
        able = self._able[tier]
        if able.get(one.rid) is not one:
            return inf
        if self._policy.load(able.values(), self.computing) is not one:
            return inf
        if (current := self._loading.get(tier)) is None:
            return 0.0
        (stretch,) = (each for each in current.pointers.stretches if each.tier == tier)
        expected = self._costs.loads[tier].seconds(stretch.flying * self._page)
        late = time.monotonic() - stretch.began - expected
        # A device that is so late may hang: nobody waits for what it would load next.
        return inf if late > expected + _PATIENCE_S else max(-late, 0.0)

    def close(self) -> None:
        """Nothing more is begun."""
        with self.lock:
            self._closed = True
            for able in self._able.values():
                able.clear()

    def _next(self, name: str) -> None:
        """Begins the next load of a tier that has none under way. With the lock held."""
        able = self._able[name]
        while able and name not in self._loading and not self._closed:
            one = self._policy.load(able.values(), self.computing)
            taken = one.pointers.take(name, self._unit, time.monotonic())
            self._note(one)
            if taken is None:
                able.pop(one.rid, None)
                continue
            begin, end = (page - one.begin for page in taken)
            self._loading[name] = one
            then = partial(self._landed, name, one)
            self._tiers[name].load_then(one.keys[begin:end], one.places[begin:end], then)

    def _landed(self, name: str, one: Restoration, good: NDArray[np.bool_], seconds: float) -> None:
        """In the tier's thread."""
        with self.lock:
            del self._loading[name]
            one.pointers.land(name, good.tolist())
            if good.any():
                self._costs.loaded(name, len(good) * self._page, seconds)
                one.loaded[name] = one.loaded.get(name, 0) + int(np.count_nonzero(good))
            self._note(one)
            self._next(name)

    def _note(self, one: Restoration) -> None:
        """Which tiers could load something for the request."""
        one.estimate(self._costs, self._page)
        one.rank = one.precedence, self._policy.rank(one)
        for stretch in one.pointers.stretches:
            able = self._able[stretch.tier]
            if not one.gone and one.pointers.left(stretch.tier):
                able[one.rid] = one
            elif able.get(one.rid) is one:  # not its successor of the same name
                del able[one.rid]
