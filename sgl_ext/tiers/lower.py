"""Asynchronous interface of a tier below host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.part_loads import PartLoads
from sgl_ext.tiers.throughput import LoadThroughput, Traffic
from sgl_ext.tiers.tier import Tier

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

logger = logging.getLogger(__name__)


class Pending(Protocol[R_co]):
    """Operation of a tier that may be in progress, such as a ``concurrent.futures.Future``."""

    def done(self) -> bool:
        """Returns whether the operation has ended or was cancelled."""

    def cancel(self) -> bool:
        """Cancels the operation; returns False if it has begun."""

    def cancelled(self) -> bool: ...

    def result(self) -> R_co:
        """Returns the result of an operation that has ended, or raises its exception."""


class LowerTier(Protocol):
    """Lookups, loads and stores of a tier that do not wait for its device.

    A lookup waits for neither loads nor stores, and a load for no store.
    """

    tier: Tier
    keep_after: int | None
    """Number of uses after which a page is stored in the tier; None if the cost model decides."""
    throughput: LoadThroughput
    loaded: Traffic
    stored: Traffic

    @property
    def under_way(self) -> int:
        """Number of lookups, loads and stores that are queued or running."""

    def lookup(self, keys: Sequence[Key]) -> Pending[int]:
        """Returns the pending number of leading ``keys`` that can be loaded."""

    def load(self, keys: Sequence[Key], pages: Pages) -> Pending[NDArray[np.bool_]]:
        """Starts to load ``keys`` into reserved slots ``pages``.

        Returns:
            A pending mask, bool ``[keys]``, that is True where a page has landed and verifies.
        """

    def load_then(
        self,
        keys: Sequence[Key],
        pages: Pages,
        then: Callable[[NDArray[np.bool_], float], None],
    ) -> None:
        """Starts a :meth:`load` and passes the mask and the seconds that it took to ``then``.

        ``then`` may run in another thread, and may start loads. It is not called if the tier is
        closed before the load begins.
        """

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """Layers ``(first, end)`` of each part of a page; none if pages are loaded whole only."""

    def load_parts(self, keys: Sequence[Key], pages: Pages, loads: PartLoads) -> None:
        """Starts to load the parts of pages that ``loads`` asks for, into reserved slots.

        ``loads`` is closed when the tier no longer writes to the slots.
        """

    def store(self, keys: Sequence[Key], pages: Pages) -> Pending[NDArray[np.bool_]]:
        """Starts to store ``keys`` from pinned slots ``pages``.

        Returns:
            A pending mask, bool ``[keys]``, that is True where the tier holds the page.
        """

    def close(self) -> None:
        """Cancels queued operations, closes the tier and waits for those that are running."""


def result_of(pending: Pending[R], otherwise: R) -> R:
    """Returns the result of an operation that has ended; ``otherwise`` if it failed or was
    cancelled.

    Logs the exception of an operation that failed.
    """
    if pending.cancelled():
        return otherwise
    try:
        return pending.result()
    except Exception:  # tiers do not raise for device errors, so this is a bug: log it
        logger.exception("an operation of a tier failed")
        return otherwise
