"""Threads that run the operations of a tier below host memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clock import Clock
from sgl_ext.planning.costs import Costs
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.part_loads import PartLoads
from sgl_ext.tiers.throughput import LoadThroughput, Traffic
from sgl_ext.tiers.tier import PartTier, Tier

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


class ThreadedTier:
    """:class:`~sgl_ext.tiers.lower.LowerTier` with a thread each for lookups, loads and stores.

    A tier that is ``immediate`` needs none for lookups.

    Args:
        keep_after: Number of uses after which a page is stored in the tier; None if the cost model
            decides. Every write wears a flash cell, so a page that no request asks for again should
            not be written.
        wake: Called when a lookup, load or store of a thread has ended.
        costs: Cost model, in which loads are recorded as those of the channel of the tier's name.
        page: Tokens of a page.
        clock: Clock of the duration of loads and stores.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        keep_after: int | None,
        wake: Callable[[], object],
        costs: Costs | None = None,
        page: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self.tier = tier
        self.keep_after = keep_after
        self.throughput = LoadThroughput(clock)
        self.loaded = Traffic()
        self.stored = Traffic()
        self._costs = costs or Costs()
        self._page = page
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: list[Future[Any]] = []
        self._wake = wake
        self._lookups, self._loads, self._stores = self._pools = [
            ThreadPoolExecutor(1, f"sgl_ext-{tier.name}-{work}")
            for work in ("lookup", "load", "store")
        ]

    @property
    def under_way(self) -> int:
        return sum(not future.done() for future in self._under_way)

    def lookup(self, keys: Sequence[Key]) -> Future[int]:
        if not self.tier.available:
            return _done(0)
        if self.tier.immediate:
            return _done(self.tier.lookup(keys))
        return self._submit(self._lookups, self.tier.lookup, keys)

    def load(self, keys: Sequence[Key], pages: Pages) -> Future[NDArray[np.bool_]]:
        return self._submit(self._loads, self._recorded_load, keys, pages)

    def load_then(
        self,
        keys: Sequence[Key],
        pages: Pages,
        then: Callable[[NDArray[np.bool_], float], None],
    ) -> None:
        def work() -> None:
            begin = self._clock()
            try:
                landed = self._load(keys, pages)
            except Exception:  # a bug, as in result_of
                logger.exception("an operation of a tier failed")
                landed = np.zeros(len(keys), np.bool_)
            then(landed, self._clock() - begin)

        self._submit(self._loads, work)

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        return self.tier.parts if isinstance(self.tier, PartTier) else ()

    def load_parts(self, keys: Sequence[Key], pages: Pages, loads: PartLoads) -> None:
        if not isinstance(self.tier, PartTier):
            raise TypeError(f"{self.tier.name} loads whole pages only")
        future = self._submit(self._loads, self._load_parts, self.tier, keys, pages, loads)
        future.add_done_callback(lambda _: loads.close())

    def store(self, keys: Sequence[Key], pages: Pages) -> Future[NDArray[np.bool_]]:
        return self._submit(self._stores, self._store, keys, pages)

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self.tier.close()  # ends I/O that a device delays
        for pool in self._pools:
            pool.shutdown()

    def _recorded_load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        begin = self._clock()
        landed = self._load(keys, pages)
        if count := int(np.count_nonzero(landed)):  # a failed load says nothing about the speed
            self._costs.loaded(self.tier.name, count * self._page, self._clock() - begin)
        return landed

    def _load_parts(
        self, tier: PartTier, keys: Sequence[Key], pages: Pages, loads: PartLoads
    ) -> None:
        name, costs, layers = tier.name, self._costs, 0
        tokens = len(keys) * self._page
        self.throughput.begin(costs.loads[name].seconds(tokens) if costs.known(name) else 0.0)
        try:
            while (part := loads.next()) is not None:
                good = bool(tier.load_part(keys, pages, part).all())
                if good:
                    layers += len(range(*tier.parts[part]))
                loads.read(good=good)
        except Exception:  # a bug, as in result_of
            logger.exception("an operation of a tier failed")
        finally:
            seconds = self.throughput.end()
        count = round(len(keys) * layers / loads.layers)  # as many whole pages have these bytes
        self.loaded.add(count, seconds)
        if count:
            costs.loaded(name, count * self._page, seconds)

    def _load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        name, costs, count = self.tier.name, self._costs, 0
        tokens = len(keys) * self._page
        self.throughput.begin(costs.loads[name].seconds(tokens) if costs.known(name) else 0.0)
        try:
            landed = self.tier.load(keys, pages)
            count = int(np.count_nonzero(landed))
        finally:
            self.loaded.add(count, self.throughput.end())
        return landed

    def _store(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        begin = self._clock()
        stored = self.tier.store(keys, pages)
        self.stored.add(int(np.count_nonzero(stored)), self._clock() - begin)
        return stored

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        future = pool.submit(work, *args, **kwargs)
        with self._lock:  # the tier's own thread submits loads, too
            self._under_way = [each for each in self._under_way if not each.done()] + [future]
        future.add_done_callback(lambda _: self._wake())
        return future


def _done(result: R) -> Future[R]:
    future: Future[R] = Future()
    future.set_result(result)
    return future
