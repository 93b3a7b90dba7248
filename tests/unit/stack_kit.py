"""Tier stack with real copies between a slab and an arena, and a tier that the test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from delayed_copies import DelayedEngine
from tier_kit import DEADLINE_S, LAYOUTS, Shelf, arena, content

from sgl_ext.memory.lanes import Lane
from sgl_ext.memory.slab import HostSlab
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import Cake
from sgl_ext.planning.prefixes import Prefixes
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.layer_loads import LayerLoads
from sgl_ext.tiers.stack import TierStack
from sgl_ext.tiers.threaded import ThreadedTier

BLOCKS = 64


def planner_of(stack: TierStack, costs: Costs, *, wait: float, spare: int = 0) -> Planner:
    """Returns a planner that loads wants as a whole, the first that came first."""
    planner = Planner(
        stack.host, stack.lower, Cake(), costs,
        page=stack.layout.page, unit=8, wait=wait, spare=spare, hits=stack.hits,
        clock=time.monotonic, lock=threading.Lock(),
    )  # fmt: skip
    stack.keepers.append(planner.give_up_one)
    return planner


class Machine:
    """Device pool, arena and stack; a block holds the content of the key that is stored in it."""

    def __init__(
        self,
        page: int,
        pages: int,
        *,
        keep_after: int = 2,
        wait: float = 60.0,
        bytes_per_second: float | None = None,
        by_layer: bool = False,
        delayed: DelayedEngine | None = None,
        spare: int = 0,
    ) -> None:
        """Creates the pool, the arena and the stack.

        Args:
            delayed: engine that decides when copies happen; if None, they start at once.
        """
        self.layout = LAYOUTS[page]
        self.engine = TransferEngine()
        self.slab = HostSlab.create(self.layout, BLOCKS)
        self.engine.register(self.slab.address, self.slab.size, owner=self.slab)
        self.arena = arena(self.engine, pages, self.layout)
        self.blocks = np.asarray(self.slab.mapping)[-self.slab.size :].reshape(BLOCKS, -1)
        lane: Lane = self.engine.host_lane()
        if bytes_per_second is not None:
            lane = self.engine.throttled_lane(lane, bytes_per_second=bytes_per_second)
        engine: Any = self.engine
        self.costs = Costs()
        if delayed is not None:
            delayed.real, engine = self.engine, delayed
        copies = DeviceCopies(
            engine, lane, self.slab, self.arena, costs=self.costs, by_layer=by_layer
        )
        self.shelf = Shelf(self.arena)
        wake = threading.Event()
        self.stack = TierStack(
            HostPages(pages),
            copies,
            LayerLoads(copies.groups, DEADLINE_S),
            [
                ThreadedTier(
                    self.shelf, keep_after=keep_after, wake=wake.set, costs=self.costs, page=page
                )
            ],
            costs=self.costs,
            wake=wake,
            closing=[self.engine.close],
        )
        self.planner = planner_of(self.stack, self.costs, wait=wait, spare=spare)
        self.prefixes = Prefixes(self.stack, self.planner)

    def compute(self, keys: Sequence[Key], blocks: Pages) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self.blocks[block] = content(key, self.layout)

    def right(self, keys: Sequence[Key], blocks: Pages) -> bool:
        pairs = zip(keys, blocks, strict=True)
        return all(np.array_equal(self.blocks[b], content(k, self.layout)) for k, b in pairs)

    def store(self, keys: Sequence[Key], blocks: Pages) -> bool:
        self.compute(keys, blocks)
        self.stack.stores.store(keys, blocks)
        self.stack.check_integrity()
        self.until(lambda: self.stack.stores.completed() == 1)
        return self.stack.stores.pop()

    def load(self, rid: str, keys: Sequence[Key], blocks: Pages) -> bool:
        self.blocks[blocks] = 0xDD
        if not self.prefixes.load(rid, keys, blocks):
            return False
        self.stack.check_integrity()
        index = self.stack.loads.start()
        counter = self.stack.loads.layers  # start() has set its consumer for the next forward
        row = self.layout.token_bytes // self.layout.layers
        whole = np.array([content(key, self.layout) for key in keys])
        for layer in range(self.layout.layers):
            counter.wait_until(layer)
            shape = (len(keys), self.layout.page, self.layout.layers, row)
            here = self.blocks[blocks].reshape(shape)[:, :, layer]
            assert np.array_equal(here, whole.reshape(shape)[:, :, layer])
        assert self.stack.loads.finish(index)
        self.stack.check_integrity()
        assert self.stack.loads.start() == -1
        assert counter.consumer_index == -1
        return self.right(keys, blocks)

    def shelve(self, keys: Sequence[Key]) -> None:
        """Puts pages on the shelf, as another process would."""
        for key in keys:
            page = np.zeros(self.arena.stride, np.uint8)
            page[: self.layout.block_bytes] = content(key, self.layout)
            self.shelf.pages[key] = page.tobytes()

    def until(self, condition: Callable[[], object]) -> None:
        """Polls the stack, at least once, until ``condition`` is true."""
        deadline = time.monotonic() + DEADLINE_S
        self.poll()
        while not condition():
            assert time.monotonic() < deadline
            self.stack.wait(0.01)
            self.poll()

    def poll(self) -> None:
        self.planner.advance()
        self.stack.poll()
        self.check_integrity()

    def check_integrity(self) -> None:
        self.planner.check_integrity()
        self.stack.check_integrity()

    def clear(self) -> None:
        self.planner.clear()
        self.stack.clear()

    def disable(self, reason: str) -> None:
        self.planner.clear()
        self.stack.disable(reason)

    def close(self) -> None:
        self.planner.close()
        self.stack.close()

    def settle(self, rid: str) -> None:
        self.until(lambda: self.prefixes.ready(rid))
