"""What a tier is: somewhere that whole pages can be put and found again by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers.arena import Key, Pages


class Tier(Protocol):
    """Pages beyond host memory. Its methods may wait for a device, so the stack's threads call it.

    Nothing raises for what a device does: pages that did not land are False in the result, and
    ``failures`` counts them by reason. Thread-safe: loads and stores run side by side.
    """

    name: str
    immediate: bool
    """Whether ``lookup`` answers from memory, without waiting."""

    @property
    def available(self) -> bool:
        """False while it is known to be of no use: no device left, a store that is away."""

    def lookup(self, keys: Sequence[Key]) -> int:
        """How many of ``keys``, from the first on, it holds. May be wrong: ``load`` tells."""

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Reads pages into places of the arena; True where the right bytes have landed.

        When it returns, nothing more is written to any of these places.
        """

    def store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Keeps what lies in these places, sealed; True where it can be found from now on."""

    def statistics(self) -> TierStatistics:
        """Its state for metrics; never waits."""

    def close(self) -> None:
        """Ends its I/O and gives everything back."""


@dataclass(frozen=True)
class TierStatistics:
    """Of one tier, since it was opened."""

    pages: int
    """That it holds; of a shared store, that this process has put there."""
    capacity: int
    """Pages; 0 if not known."""
    evicted: int
    """Pages that had to make room for others; 0 if not known."""
    failures: dict[str, int]
    """Pages that could not be loaded or stored, by reason (``EIO``, ``checksum``...)."""


def leading(mask: NDArray[np.bool_]) -> int:
    """How many are True from the first on."""
    return int(np.argmin(mask)) if len(mask) and not mask.all() else len(mask)
