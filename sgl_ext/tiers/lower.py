"""A tier below host memory with the threads that wait for it, and what it has been worth."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.tier import Tier

P = ParamSpec("P")
R = TypeVar("R")

_MEMORY = 0.8
"""Weight of what was measured before in a running estimate."""
_RETRY_S = 30.0
_HANGS_S = 10.0
"""A load that is so late keeps others from being begun."""

logger = logging.getLogger(__name__)


@dataclass
class Traffic:
    """Pages and seconds of one direction."""

    pages: int = 0
    seconds: float = 0.0

    def add(self, pages: int, seconds: float) -> None:
        self.pages += pages
        self.seconds += seconds


class LowerTier:
    """One thread loads, one stores, so that neither waits for the other.

    Args:
        keep_after: a page is given to the tier when it was used that often. A flash cell wears
            with every write, so a page that nobody asks for again should not cost one.
        wake: called by a thread when something is finished.
    """

    def __init__(self, tier: Tier, *, keep_after: int, wake: Callable[[], None]) -> None:
        self.tier = tier
        self.keep_after = keep_after
        self.loaded = Traffic()
        self.stored = Traffic()
        self.pages_per_second: float | None = None
        """Of late loads; None before the first."""
        self._lock = threading.Lock()
        self._under_way: list[Future[Any]] = []
        self._last_load = -math.inf
        self._late_at: float | None = None
        """When what is being loaded should have come long ago."""
        self._wake = wake
        self._loads = ThreadPoolExecutor(1, f"sgl_ext-{tier.name}-load")
        self._stores = ThreadPoolExecutor(1, f"sgl_ext-{tier.name}-store")

    @property
    def under_way(self) -> int:
        """Look-ups, loads and stores that wait or go on."""
        return sum(not future.done() for future in self._under_way)

    def worthwhile(self, computed_pages_per_second: float | None) -> bool:
        """Whether loading is worth waiting for, as far as is known.

        A slow tier is tried again after :data:`_RETRY_S`: its device may have been busy.
        """
        late_at = self._late_at  # the load's thread changes it
        if late_at is not None and time.monotonic() > late_at:
            return False  # whatever is asked now waits behind that load
        if self.pages_per_second is None or computed_pages_per_second is None:
            return True
        long_ago = time.monotonic() - self._last_load > _RETRY_S
        return long_ago or self.pages_per_second > computed_pages_per_second

    def lookup(self, keys: Sequence[Key]) -> Future[int]:
        """How many of ``keys``, from the first on, can be loaded."""
        if not self.tier.available:
            return _done(0)
        if self.tier.immediate:
            return _done(self.tier.lookup(keys))
        return self._submit(self._loads, self.tier.lookup, keys)

    def load(self, keys: Sequence[Key], pages: Pages) -> Future[NDArray[np.bool_]]:
        """Loads into held places; True where the right bytes have landed."""
        return self._submit(self._loads, self._load, keys, pages)

    def load_then(
        self,
        keys: Sequence[Key],
        pages: Pages,
        then: Callable[[NDArray[np.bool_], float], None],
    ) -> None:
        """As :meth:`load`; ``then`` is given the result and the seconds that it took, in the
        tier's thread, unless the tier is closed first."""

        def work() -> None:
            begin = time.monotonic()
            try:
                landed = self._load(keys, pages)
            except Exception:  # as in result_of
                logger.exception("a thread of a tier failed")
                landed = np.zeros(len(keys), np.bool_)
            then(landed, time.monotonic() - begin)

        self._submit(self._loads, work)

    def store(self, keys: Sequence[Key], pages: Pages) -> Future[NDArray[np.bool_]]:
        """Stores pinned places."""
        return self._submit(self._stores, self._store, keys, pages)

    def close(self) -> None:
        """Drops what has not begun, closes the tier, waits for what that leaves."""
        for pool in (self._loads, self._stores):
            pool.shutdown(wait=False, cancel_futures=True)
        self.tier.close()  # which ends what a device holds up
        for pool in (self._loads, self._stores):
            pool.shutdown()

    def _load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        begin = time.monotonic()
        expected = len(keys) / self.pages_per_second if self.pages_per_second else 0.0
        self._late_at = begin + _HANGS_S + 2 * expected
        try:
            landed = self.tier.load(keys, pages)
        finally:
            self._late_at = None
        self._last_load = time.monotonic()
        seconds = self._last_load - begin
        count = int(np.count_nonzero(landed))
        self.loaded.add(count, seconds)
        if count:  # one that failed says nothing of how fast the others are
            self.pages_per_second = running_rate(self.pages_per_second, count / max(seconds, 1e-6))
        return landed

    def _store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        begin = time.monotonic()
        stored = self.tier.store(keys, pages)
        self.stored.add(int(np.count_nonzero(stored)), time.monotonic() - begin)
        return stored

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        future = pool.submit(work, *args, **kwargs)
        with self._lock:  # loads are asked for by their tier's thread, too
            self._under_way = [each for each in self._under_way if not each.done()] + [future]
        future.add_done_callback(lambda _: self._wake())
        return future


def running_rate(before: float | None, now: float) -> float:
    """The estimate after another measurement; ``before`` is None if this is the first."""
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now


def _done(result: R) -> Future[R]:
    future: Future[R] = Future()
    future.set_result(result)
    return future


def result_of(future: Future[R], otherwise: R) -> R:
    """The result of a future that is done; ``otherwise`` if its thread failed."""
    try:
        return future.result(0)
    except CancelledError:
        return otherwise
    except Exception:  # a tier answers for its device, so this is a fault of ours: be seen
        logger.exception("a thread of a tier failed")
        return otherwise
