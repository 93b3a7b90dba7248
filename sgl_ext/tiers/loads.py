"""Loads of pages from host memory to the device, one for each batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import numpy as np

from sgl_ext.planning.decisions import Decisions
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.layer_loads import LayerLoads
from sgl_ext.tiers.throughput import Traffic


class Restored(TypedDict):
    """KV that one tier contributed to the load of a request."""

    tokens: int
    bytes: int
    seconds: float
    """Seconds of the load into host memory; for the host tier, of the copy of all pages to the
    device."""


class _Load(NamedTuple):
    rid: str
    pages: Pages
    blocks: Pages
    restored: Restored


class Loads:
    """Queued and started loads. A page is pinned from :meth:`queue` until its load has ended.

    Args:
        layers: Layer-wise completion of the loads, which the forward waits for.
        hits: Pages that requests loaded, by the name of the tier that had them; counted here.
        decisions: Decisions, of which those to load get the duration of the load.
    """

    def __init__(
        self,
        host: HostPages,
        copies: DeviceCopies,
        layers: LayerLoads,
        hits: Counter[str],
        decisions: Decisions,
    ) -> None:
        self.layers = layers
        self.traffic = Traffic()
        """Pages copied to the device, and the seconds of these loads."""
        self._host = host
        self._copies = copies
        self._hits = hits
        self._decisions = decisions
        self._restored: dict[str, dict[str, Restored]] = {}
        self._queued: dict[str, _Load] = {}
        self._loading: dict[int, list[_Load]] = {}

    def queue(
        self,
        rid: str,
        keys: Sequence[Key],
        blocks: Pages,
        landed: Mapping[str, int],
        seconds: float,
    ) -> Pages:
        """Queues a load of ``keys``, all in host memory, into ``blocks`` of the device.

        Args:
            landed: Pages of ``keys`` that came from each lower tier for this request, by its name.
            seconds: Seconds that they took.

        Returns:
            The slots of the pages.
        """
        pages = self._host.use(keys)
        self._host.pin(pages)
        restored: dict[str, Restored] = {}
        left = len(keys)
        for name, count in landed.items():
            self._count(restored, name, min(count, left), seconds)
            left -= min(count, left)
        self._count(restored, "host", left, 0.0)
        self._restored[rid] = restored
        self._queued[rid] = _Load(rid, pages, blocks, restored["host"])
        return pages

    def start(self) -> int:
        """Starts the queued loads, layer by layer, as one load.

        Returns:
            The number of the load in :attr:`layers`; -1 if nothing is queued.
        """
        if not self._queued:
            self.layers.set_consumer(-1)
            return -1
        loads = [*self._queued.values()]
        self._queued.clear()
        pages = np.concatenate([load.pages for load in loads])
        blocks = np.concatenate([load.blocks for load in loads])
        index = self.layers.start(self._copies.load(pages, blocks))
        # The batch that is being built runs next. SGLang sets the consumer for generation only,
        # and an embedding request would attend to KV that has not landed.
        self.layers.set_consumer(index)
        self._loading[index] = loads
        return index

    def finish(self, index: int) -> bool:
        """Waits until a load has ended; returns whether all of it has landed.

        Raises:
            TimeoutError: A copy is still in progress.
        """
        seconds = self.layers.finish(index)
        loads = self._loading.pop(index, [])
        for load in loads:
            self._host.unpin(load.pages)
            if seconds is not None:
                load.restored["seconds"] = seconds
                self.traffic.pages += len(load.pages)
        self.traffic.seconds += seconds or 0.0
        if len(loads) == 1:  # else the duration is that of several
            self._decisions.ended("load_or_compute", loads[0].rid, seconds)
        return seconds is not None

    def cancel(self, rid: str) -> bool:
        """Cancels a request's queued load; returns whether one was queued.

        A load that has started is not cancelled.
        """
        self._restored.pop(rid, None)
        if (queued := self._queued.pop(rid, None)) is None:
            return False
        self._host.unpin(queued.pages)
        return True

    def take_restored(self, rid: str) -> dict[str, Restored]:
        """Returns and forgets the contribution of each tier to the request's load, by tier name.

        Empty if the request loaded nothing. The seconds of the host tier are 0 until :meth:`finish`
        has returned True for the load.
        """
        return self._restored.pop(rid, {})

    def loads(self, rid: str) -> bool:
        """Returns whether a load of the request is queued or in progress."""
        return any(load.rid == rid for load in self._all)

    def forget(self, rid: str) -> None:
        """Forgets what :meth:`take_restored` would return for the request."""
        self._restored.pop(rid, None)

    def clear(self) -> None:
        """Cancels the queued loads, and waits for the others.

        Raises:
            TimeoutError: A load is still in progress.
        """
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._loading):
            self.finish(index)

    @property
    def pinned(self) -> list[Pages]:
        """Pages of the loads that are queued or in progress."""
        return [load.pages for load in self._all]

    def check_integrity(self) -> None:
        """Checks the loads against their reports. O(pages).

        Raises:
            AssertionError: a load has other numbers of pages and blocks, a queued load has no
                report, or its report does not add up to its pages.
        """
        for load in self._all:
            if len(load.pages) != len(load.blocks):
                raise AssertionError(f"{len(load.pages)} pages load into {len(load.blocks)} blocks")
        for rid, load in self._queued.items():
            if (restored := self._restored.get(rid)) is None:
                raise AssertionError(f"{rid} has a load, and no report of it")
            tokens = sum(one["tokens"] for one in restored.values())
            if restored["host"] is not load.restored:
                raise AssertionError(f"{rid} has the report of another load: {restored}")
            if tokens != len(load.pages) * self._copies.layout.page:
                raise AssertionError(f"{rid} loads {len(load.pages)} pages, reported {restored}")

    @property
    def _all(self) -> list[_Load]:
        started = [load for loads in self._loading.values() for load in loads]
        return [*self._queued.values(), *started]

    def _count(self, restored: dict[str, Restored], name: str, pages: int, seconds: float) -> None:
        self._hits[name] += pages
        page, block_bytes = self._copies.layout.page, self._copies.layout.block_bytes
        restored[name] = Restored(tokens=pages * page, bytes=pages * block_bytes, seconds=seconds)
