"""Request with pages in lower tiers: the lookups, and the places that its pages are loaded into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from sgl_ext.planning.channels import Restoration
from sgl_ext.planning.pointers import Pointers, Stretch
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, Pending, result_of


class Restored(TypedDict):
    """Report on the restoration of a prefix that lower tiers had; counts are tokens."""

    loaded: dict[str, int]
    """Loaded tokens by tier."""
    computed: int
    """Computed tokens."""
    seconds: float
    """Time from the request's arrival until its last forward began, in seconds."""


@dataclass(slots=True)
class Request:
    """Request between its first lookup and the end of its restoration."""

    keys: Sequence[Key]
    """Keys of the pages after those that device and host memory have."""
    first: int
    """Number of the first of these pages in the prompt."""
    prompt_tokens: int
    """Tokens of the prompt."""
    lookups: list[tuple[LowerTier, Pending[int]]]
    """Lookups of the tiers, nearest first; each returns how many leading keys its tier has."""
    pinned: Pages
    """Pinned pages in host memory that precede :attr:`keys`."""
    arrived: float
    """Time of arrival on the monotonic clock, in seconds."""
    asked: float
    """Time of the lookups; later than the arrival for a request that has followed another one."""
    seen: float
    """Last time that the scheduler asked for the request, on the monotonic clock in seconds."""
    precedence: int

    @property
    def answered(self) -> bool:
        """Returns whether all tiers have answered their lookups."""
        return all(lookup.done() for _, lookup in self.lookups)

    @property
    def nothing(self) -> bool:
        """Returns whether all tiers have answered and none has any of the keys."""
        return self.answered and not any(result_of(lookup, 0) for _, lookup in self.lookups)

    def open(self, rid: str, host: HostPages, *, scarce: bool) -> Restoration | None:
        """Reserves places in ``host`` for the pages that tiers have, or for the last of them.

        Args:
            scarce: True to accept fewer places than the pages need.

        Returns:
            None if a lookup is pending, there is nothing to load, or there is not enough room.
        """
        if not self.answered:
            return None
        stretches, end = self._stretches()
        wanted = min(end - self.first, host.capacity)
        if not scarce and wanted > host.room:
            return None  # other requests hold the places and are restored first
        places = host.reserve(min(wanted, host.room))
        if places is None or not len(places):
            return None
        host.refuse(wanted - len(places))
        begin = end - len(places)
        for stretch in stretches:
            stretch.begin = max(stretch.begin, begin)
        return Restoration(
            rid,
            self.arrived,
            self.prompt_tokens,
            Pointers(self.first, [one for one in stretches if one.begin < one.end]),
            self.first,
            begin,
            self.keys[begin - self.first : end - self.first],
            places,
            self.precedence,
        )

    def _stretches(self) -> tuple[list[Stretch], int]:
        """Returns the pages of each tier that no nearer tier has, and the end of all of them."""
        found, at = [], self.first
        for tier, lookup in self.lookups:
            if (end := self.first + result_of(lookup, 0)) > at:
                found.append(Stretch(tier.tier.name, at, end))
                at = end
        return found, at
