"""Threads and throughput estimates of a tier below host memory."""

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
"""Weight of the previous estimate in an exponential moving average."""
_RETRY_S = 30.0
"""Seconds after the last load at which a tier that is slower than computing is tried again."""
_HANGS_S = 10.0
"""Seconds beyond twice the expected time after which a load in progress counts as hung."""

logger = logging.getLogger(__name__)


@dataclass
class Traffic:
    """Pages that were moved in one direction, and the seconds spent on it."""

    pages: int = 0
    seconds: float = 0.0

    def add(self, pages: int, seconds: float) -> None:
        """Adds one transfer."""
        self.pages += pages
        self.seconds += seconds


class LowerTier:
    """Asynchronous interface of a tier: one thread for lookups and loads, one for stores.

    With two threads, a load does not wait for a store.

    Args:
        keep_after: Number of uses after which a page is stored in the tier. Every write wears a
            flash cell, so a page that no request asks for again should not be written.
        wake: Called when a lookup, load or store of a thread has ended.
    """

    def __init__(self, tier: Tier, *, keep_after: int, wake: Callable[[], None]) -> None:
        self.tier = tier
        self.keep_after = keep_after
        self.loaded = Traffic()
        self.stored = Traffic()
        self.pages_per_second: float | None = None
        """Moving average of the throughput of loads; None before the first."""
        self._lock = threading.Lock()
        self._under_way: list[Future[Any]] = []
        self._last_load = -math.inf
        self._late_at: float | None = None
        """Monotonic time after which the load in progress counts as hung; None if there is none."""
        self._wake = wake
        self._loads = ThreadPoolExecutor(1, f"sgl_ext-{tier.name}-load")
        self._stores = ThreadPoolExecutor(1, f"sgl_ext-{tier.name}-store")

    @property
    def under_way(self) -> int:
        """Number of lookups, loads and stores that are queued or running."""
        return sum(not future.done() for future in self._under_way)

    def worthwhile(self, computed_pages_per_second: float | None) -> bool:
        """Returns whether loading is expected to be faster than computing.

        True as long as one of the rates is unknown. False while a load hangs. A slow tier is tried
        again :data:`_RETRY_S` after its last load: its device may have been busy.
        """
        late_at = self._late_at  # read once: the thread of the load changes it
        if late_at is not None and time.monotonic() > late_at:
            return False  # a new lookup or load would wait behind that load
        if self.pages_per_second is None or computed_pages_per_second is None:
            return True
        long_ago = time.monotonic() - self._last_load > _RETRY_S
        return long_ago or self.pages_per_second > computed_pages_per_second

    def lookup(self, keys: Sequence[Key]) -> Future[int]:
        """Returns a future of the number of leading ``keys`` that can be loaded."""
        if not self.tier.available:
            return _done(0)
        if self.tier.immediate:
            return _done(self.tier.lookup(keys))
        return self._submit(self._loads, self.tier.lookup, keys)

    def load(self, keys: Sequence[Key], pages: Pages) -> Future[NDArray[np.bool_]]:
        """Starts to load ``keys`` into reserved slots ``pages``.

        Returns:
            A future of a mask, bool ``[keys]``, that is True where a page has landed and verifies.
        """
        return self._submit(self._loads, self._load, keys, pages)

    def load_then(
        self,
        keys: Sequence[Key],
        pages: Pages,
        then: Callable[[NDArray[np.bool_], float], None],
    ) -> None:
        """Starts a :meth:`load` and passes the mask and the seconds that it took to ``then``.

        ``then`` runs in the tier's thread. It is not called if the tier is closed before the load
        begins.
        """

        def work() -> None:
            begin = time.monotonic()
            try:
                landed = self._load(keys, pages)
            except Exception:  # a bug, as in result_of
                logger.exception("an operation of a tier failed")
                landed = np.zeros(len(keys), np.bool_)
            then(landed, time.monotonic() - begin)

        self._submit(self._loads, work)

    def store(self, keys: Sequence[Key], pages: Pages) -> Future[NDArray[np.bool_]]:
        """Starts to store ``keys`` from pinned slots ``pages``.

        Returns:
            A future of a mask, bool ``[keys]``, that is True where the tier holds the page.
        """
        return self._submit(self._stores, self._store, keys, pages)

    def close(self) -> None:
        """Cancels queued work, closes the tier and waits for the work that is running."""
        for pool in (self._loads, self._stores):
            pool.shutdown(wait=False, cancel_futures=True)
        self.tier.close()  # ends I/O that a device delays
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
        if count:  # a failed load says nothing about throughput
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
        with self._lock:  # the tier's own thread submits loads, too
            self._under_way = [each for each in self._under_way if not each.done()] + [future]
        future.add_done_callback(lambda _: self._wake())
        return future


def running_rate(before: float | None, now: float) -> float:
    """Returns the moving average after the measurement ``now``; ``before`` is None at the first."""
    return now if before is None else _MEMORY * before + (1 - _MEMORY) * now


def _done(result: R) -> Future[R]:
    future: Future[R] = Future()
    future.set_result(result)
    return future


def result_of(future: Future[R], otherwise: R) -> R:
    """Returns the result of a finished future; ``otherwise`` if it failed or was cancelled.

    Logs the exception of a future that failed.
    """
    try:
        return future.result(0)
    except CancelledError:
        return otherwise
    except Exception:  # tiers do not raise for device errors, so this is a bug: log it
        logger.exception("an operation of a tier failed")
        return otherwise
