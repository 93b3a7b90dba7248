"""Interface of a tier, which stores whole pages and finds them again by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers.arena import Key, Pages


class Tier(Protocol):
    """Storage of pages below host memory.

    ``load`` and ``store``, and ``lookup`` unless ``immediate``, may wait for a device and are
    called by threads of the stack. Device errors do not raise: pages that did not land are False in
    the result, and ``failures`` counts them by reason. Thread-safe: lookups, loads and stores run
    concurrently.
    """

    name: str
    immediate: bool
    """True if ``lookup`` answers from memory, without waiting."""

    @property
    def available(self) -> bool:
        """False while the tier cannot serve: no device is left, or the store is unreachable."""

    def lookup(self, keys: Sequence[Key]) -> int:
        """Returns the number of leading ``keys`` that the tier holds.

        The result may be wrong; only ``load`` verifies the pages.
        """

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Reads pages into arena slots; nothing writes to the slots after it has returned.

        Args:
            pages: Slot for each key, ``[keys]``.

        Returns:
            A mask, bool ``[keys]``, that is True where a page has landed and verifies.
        """

    def store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        """Seals and stores the pages in arena slots.

        Args:
            pages: Slot of each key, ``[keys]``.

        Returns:
            A mask, bool ``[keys]``, that is True where the page can be found from now on.
        """

    def statistics(self) -> TierStatistics:
        """Returns the state of the tier for metrics; does not wait for I/O."""

    def close(self) -> None:
        """Ends all I/O and releases all resources."""


@runtime_checkable
class PartTier(Tier, Protocol):
    """Tier that can load parts of pages."""

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """Layers ``(first, end)`` of each part of a page; none if pages are loaded whole only."""

    def load_part(self, keys: Sequence[Key], pages: Pages, part: int) -> NDArray[np.bool_]:
        """Reads one part of each page, like ``load``; the last part is read first."""


@dataclass(frozen=True)
class TierStatistics:
    """Statistics of one tier since it was opened."""

    pages: int
    """Pages that the tier holds; for a shared store, pages that this process has stored."""
    capacity: int
    """Capacity in pages; 0 if unknown."""
    evicted: int
    """Pages evicted so far; 0 if unknown."""
    failures: dict[str, int]
    """Pages that could not be loaded or stored, by reason (``EIO``, ``checksum``...)."""
    directories: dict[str, str] = field(default_factory=dict)
    """State of each directory that the tier has, by its path."""


def leading(mask: NDArray[np.bool_]) -> int:
    """Returns the number of leading True values."""
    return int(np.argmin(mask)) if len(mask) and not mask.all() else len(mask)
