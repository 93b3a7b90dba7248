"""Want whose pages tiers are asked for: lookups, and places that its pages are loaded to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypedDict

import numpy as np

from sgl_ext.planning.channels import Restoration
from sgl_ext.planning.pointers import Pointers, Stretch
from sgl_ext.planning.want import Positions, Want
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, Pending, result_of

NOWHERE = -1
"""Place of a page that is not loaded."""


class Restored(TypedDict):
    """Report on a want whose pages were computed and loaded; counts are tokens."""

    loaded: dict[str, int]
    """Loaded tokens by tier."""
    computed: int
    """Computed tokens."""
    seconds: float
    """Time from the request's arrival until its last forward began, in seconds."""


@dataclass(slots=True)
class Request:
    """Want between its first lookup and the end of the request's prefill."""

    want: Want
    whole: bool
    """Whether all pages are loaded before anything is computed."""
    keys: Sequence[Key]
    """Keys of the pages that host memory lacks, of all runs."""
    at: Positions
    """Positions of these pages."""
    lookups: list[tuple[int, list[tuple[LowerTier, Pending[int]]]]]
    """For each run the number of its first lacking page, and the lookups of the tiers, the nearest
    first; each returns how many leading pages of the run its tier has. Empty lookups of a run that
    lacks none."""
    pinned: Pages
    """Pinned pages in host memory that precede the lacking pages of their runs."""
    arrived: float
    """Time of arrival on the clock, in seconds."""
    asked: float
    """Time of the lookups; later than the arrival for a request that has followed another one."""
    seen: float
    """Last time that the scheduler asked for the request, on the clock in seconds."""
    landed: dict[str, int] = field(default_factory=dict)
    """Pages that each tier has loaded, once a :attr:`whole` want is in host memory."""
    seconds: float = 0.0
    """Seconds from the lookup until then."""

    @property
    def answered(self) -> bool:
        """Returns whether all tiers have answered their lookups."""
        return all(lookup.done() for _, lookup in self._every)

    @property
    def nothing(self) -> bool:
        """Returns whether all tiers have answered and none has any of the keys."""
        return self.answered and not any(result_of(lookup, 0) for _, lookup in self._every)

    @property
    def _every(self) -> Iterator[tuple[LowerTier, Pending[int]]]:
        return chain.from_iterable(lookups for _, lookups in self.lookups)

    def open(self, host: HostPages, room: int, unit: int, *, scarce: bool) -> Restoration | None:
        """Reserves places in ``host`` for the pages that tiers have.

        If there are fewer places, they go to the first pages of a whole want, which would be of no
        use without the pages before them, and to the last pages of another want.

        Args:
            room: maximum number of places.
            unit: maximum pages of one load.
            scarce: True to accept fewer places than the pages need.

        Returns:
            None if a lookup is pending, there is nothing to load, or there is not enough room.
        """
        if not self.answered:
            return None
        stretches = [*self._stretches()]
        pages = sum(one.end - one.begin for one in stretches)
        wanted = min(pages, host.capacity)
        if not scarce and wanted > room:
            return None  # other requests hold the places and are restored first
        places = host.reserve(min(wanted, room))
        if places is None or not len(places):
            return None
        host.refuse(wanted - len(places))
        self._cut(stretches, pages - len(places))
        stretches = [one for one in stretches if one.begin < one.end]
        there = np.full(stretches[-1].end, NOWHERE, np.int64)
        there[np.concatenate([np.arange(one.begin, one.end) for one in stretches])] = places
        return Restoration(
            self.want.name, self.arrived, self.want.tokens, Pointers(0, stretches), self.at,
            self.keys, there, self.want.precedence, unit=len(there) if self.whole else unit,
            whole=self.whole, position=self.at.start(0),
        )  # fmt: skip

    def _cut(self, stretches: list[Stretch], pages: int) -> None:
        """Takes away ``pages`` pages, the last of a whole want or the first of another one."""
        for one in reversed(stretches) if self.whole else stretches:
            less = min(pages, one.end - one.begin)
            pages -= less
            if self.whole:
                one.end = one.last = one.end - less
            else:
                one.begin += less

    def _stretches(self) -> Iterator[Stretch]:
        """Yields the pages of each run and tier that no nearer tier has."""
        for first, lookups in self.lookups:
            at = first
            for tier, lookup in lookups:
                if (end := first + result_of(lookup, 0)) > at:
                    yield Stretch(tier.tier.name, at, end)
                    at = end
