"""Stand-in for SGLang's radix tree: pages of KV on the device, by number, with locks and stores."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from simulated_engine import PAGE, SimulatedEngine, key

from sgl_ext.tiers.arena import Pages


class SimulatedTree:
    """Cached pages, which are stored in host memory when they are inserted."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.blocks: dict[int, int] = {}
        """Block of each page, the least recently used one first."""
        self.locks: Counter[int] = Counter()
        self._engine = engine
        self._offloads: deque[list[int]] = deque()

    def match(self, pages: Sequence[int]) -> list[int]:
        """Returns the leading pages that are on the device, and marks them as used."""
        found = list(takewhile(self.blocks.__contains__, pages))
        for page in reversed(found):
            self.blocks[page] = self.blocks.pop(page)
        return found

    def places(self, pages: Sequence[int]) -> Pages:
        return np.array([self.blocks[page] for page in pages], np.int64)

    def lock(self, pages: Sequence[int]) -> None:
        self.locks.update(pages)

    def unlock(self, pages: Sequence[int]) -> None:
        self.locks.subtract(pages)
        for page in pages:
            if not self.locks[page]:
                del self.locks[page]

    def insert(self, pages: Sequence[int], blocks: Pages) -> None:
        """Takes over whole pages from their first one on; frees those that it has already."""
        there = [page in self.blocks for page in pages]
        twice = [
            int(block)
            for page, block, known in zip(pages, blocks, there, strict=True)
            if known and self.blocks[page] != block
        ]
        new = [at for at, known in enumerate(there) if not known]
        for at in reversed(new):
            self.blocks[pages[at]] = int(blocks[at])
        if new:
            names = [pages[at] for at in new]
            self.lock(names)
            self._offloads.append(names)
            before = [key(page) for page in pages[: new[0]]]
            self._engine.stack.stores.store([key(page) for page in names], blocks[new], before)
        self.free(np.array(twice, np.int64))

    def free(self, blocks: Pages) -> None:
        if len(blocks):
            self._engine.allocator.free_page_ids(torch.from_numpy(np.sort(blocks)))

    def commit(self, count: int) -> None:
        """Unlocks the pages of the oldest stores."""
        for _ in range(count):
            self._engine.stack.stores.pop()
            self.unlock(self._offloads.popleft())

    def evict(self, blocks: int) -> None:
        """Frees pages until this many blocks are available, as far as there are unlocked ones."""
        lacking = blocks - self._engine.allocator.available_size() // PAGE
        if lacking > 0:
            unlocked = [page for page in self.blocks if not self.locks[page]][:lacking]
            self.free(np.array([self.blocks.pop(page) for page in unlocked], np.int64))

    def clear(self) -> None:
        self.blocks.clear()
        self.locks.clear()
        self._offloads.clear()

    def check_integrity(self) -> None:
        groups = self._engine.allocator.groups
        held = np.array(sorted(self.blocks.values()), np.int64)
        assert len(np.unique(held)) == len(held)
        assert groups.unused(held) is None
        assert self.locks.keys() <= self.blocks.keys(), "a locked page was evicted"
