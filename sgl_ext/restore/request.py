"""A request that tiers have something of: what they have, and the places that it is loaded to."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypedDict

from sgl_ext.restore.channels import Restoration
from sgl_ext.restore.pointers import Pointers, Stretch
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier, result_of


class Restored(TypedDict):
    """What became of a prefix that lower tiers had; tokens."""

    loaded: dict[str, int]
    """By tier."""
    computed: int
    seconds: float
    """From the request's arrival until its last forward began."""


@dataclass(slots=True)
class Request:
    """From its first look-up until it is restored or gone."""

    keys: Sequence[Key]
    """Of the pages behind those that device and host memory have."""
    first: int
    """Number of the first of them in the prompt."""
    behind: int
    """Tokens of the prompt."""
    lookups: list[tuple[LowerTier, Future[int]]]
    """The nearest tier first: how many of the keys it has, from the first on."""
    pinned: Pages
    """In host memory: of the pages before."""
    arrived: float
    asked: float
    """When tiers were asked: those who follow others are asked for later than they arrive."""
    seen: float
    precedence: int

    @property
    def answered(self) -> bool:
        """Whether all tiers have said what they have."""
        return all(lookup.done() for _, lookup in self.lookups)

    @property
    def nothing(self) -> bool:
        """Whether all tiers have said that they have nothing."""
        return self.answered and not any(result_of(lookup, 0) for _, lookup in self.lookups)

    def open(self, rid: str, host: HostPages, *, scarce: bool) -> Restoration | None:
        """Takes places in ``host`` for what tiers have, of the last pages if not for all.

        Args:
            scarce: fewer places than there could be will do.

        Returns:
            None if there is nothing to load yet.
        """
        if not self.answered:
            return None
        stretches, end = self._stretches()
        wanted = min(end - self.first, host.capacity)
        if not scarce and wanted > host.room:
            return None  # others hold them; their turn comes first
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
            self.behind,
            Pointers(self.first, [one for one in stretches if one.begin < one.end]),
            self.first,
            begin,
            self.keys[begin - self.first : end - self.first],
            places,
            self.precedence,
        )

    def _stretches(self) -> tuple[list[Stretch], int]:
        """Of each tier what the ones before it do not have, and where all of it ends."""
        found, at = [], self.first
        for tier, lookup in self.lookups:
            if (end := self.first + result_of(lookup, 0)) > at:
                found.append(Stretch(tier.tier.name, at, end))
                at = end
        return found, at
