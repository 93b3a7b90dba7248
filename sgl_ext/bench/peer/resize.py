"""Time to lend a unit and to reclaim it, in a small and in a large pool (SwiftCache §3.4).

``resize_us_ratio`` covers the bookkeeping of free blocks alone. ``resize_whole_us_ratio`` covers
all work of the worker: it decides, searches the range for cached prefixes, changes SGLang's counts,
sends its message, and adds the blocks again after its master has returned them. Both pools have the
same number of cached sequences. A run with more of them in the large pool shows the cost of the
search.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sgl_ext.bench.harness.report import Report
from sgl_ext.memory.block_groups import BlockGroups
from sgl_ext.memory.lent import Lendable
from sgl_ext.memory.mapping import PAGE
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.peer.loan import Borrower
from sgl_ext.peer.process import identity
from sgl_ext.peer.worker import Terms, Worker

_SMALL, _LARGE = 1_000, 100_000
_BLOCKS = 8
_REPEATS, _WHOLE_REPEATS = 2_000, 500
_CACHED, _MANY_CACHED, _LENGTH = 10, 1_000, 20
"""Numbers of cached sequences, and length of each in blocks."""
_LAYOUT = Layout(16, layers=1, kv_heads=1, head_dim=32, dtype="float32", fingerprint="none")
"""Layout whose blocks are memory pages, so that any number of blocks can be lent."""
_LONG_S = 1e9


def report_resize(report: Report) -> None:
    """Adds the microseconds of both pools and their ratios. Up to half of the blocks are in use."""
    sizes = _SMALL, _LARGE
    free = _medians([_Free(blocks).resize for blocks in sizes], _REPEATS)
    for blocks, median in zip(sizes, free, strict=True):
        _add(report, "resize", blocks, 0, _REPEATS, median)
    report.figures["resize_us_ratio"] = free[1] / free[0]
    settings = (_SMALL, _CACHED), (_LARGE, _CACHED), (_LARGE, _MANY_CACHED)
    *alike, many = (_Whole(*setting).resize for setting in settings)
    # The last setting empties the CPU caches, which would slow down the setting after it.
    whole = [*_medians(alike, _WHOLE_REPEATS), *_medians([many], _WHOLE_REPEATS)]
    for setting, median in zip(settings, whole, strict=True):
        _add(report, "resize_whole", *setting, _WHOLE_REPEATS, median)
    report.figures["resize_whole_us_ratio"] = whole[1] / whole[0]


def _add(report: Report, what: str, blocks: int, cached: int, samples: int, median: float) -> None:
    report.runs.append(
        {
            "what": what,
            "blocks": blocks,
            "cached_sequences": cached,
            "samples": samples,
            "resize_us_p50": 1e6 * median,
        }
    )


def _medians(each: Sequence[Callable[[], float]], repeats: int) -> Sequence[float]:
    """Returns the median result of each function.

    Calls of the functions alternate, so that other load affects all of them.
    """
    times = [[one() for one in each] for _ in range(repeats)]
    return [statistics.median(of_one) for of_one in zip(*times, strict=True)]


class _Free:
    """Bookkeeping of the free blocks of a pool, without a worker."""

    def __init__(self, blocks: int) -> None:
        self._groups = BlockGroups(blocks, page=1, expected_tokens=1)
        owners = range(0, blocks // 2, 10)
        self._groups.allocate([(owner, 10) for owner in owners])
        self._groups.release([(1 + owner, 5) for owner in owners[::2]])

    def resize(self) -> float:
        """Removes and adds blocks; returns the time in seconds."""
        began = time.perf_counter()
        self._groups.shrink(_BLOCKS)
        self._groups.grow(_BLOCKS)
        return time.perf_counter() - began


class _Whole:
    """Worker over SGLang's pool without an engine, and the messages of its master.

    Args:
        blocks: number of blocks of the pool.
        cached: number of sequences in the pool that can be evicted.
    """

    def __init__(self, blocks: int, cached: int) -> None:
        from sgl_ext.engine.kv.resize import KVResizer

        scheduler = _scheduler(blocks)
        self._tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        _cache(self._tree, allocator, cached)
        for _ in range((blocks // 2 - cached * _LENGTH) // 10):
            allocator.free(allocator.alloc(10 * _LAYOUT.page)[: 5 * _LAYOUT.page])
        self._resizer, self._all = KVResizer(scheduler), blocks
        slab = HostSlab.create(_LAYOUT, 1 + blocks)
        start = (1 + self._resizer.least) * _LAYOUT.block_bytes
        self._memory = Lendable(slab.mapping, slab.fd, slab.name, start, slab.size)
        self._slab = slab  # keeps the file open
        self._worker = Worker(
            self._memory, self, Terms("block", lease=_LONG_S, deadline=_LONG_S),
            block=_LAYOUT.block_bytes, page=_LAYOUT.page, first=1, memory_page=PAGE,
            identity=identity(),
        )  # fmt: skip
        self._now = 0.0
        lend, pid = self._worker.message, os.getpid()
        self._borrower = Borrower(b"master", pid, _LAYOUT.block_bytes, lend)
        self._borrower.most = self._memory.size
        self._worker.receive(self._borrower.message, self._now)

    @property
    def blocks(self) -> int:
        return self._resizer.blocks

    def removable(self, blocks: int) -> int:
        return min(blocks, self._resizer.removable)

    def vacate(self, blocks: int) -> int:
        from sgl_ext.engine.peer.vacate import evict

        end = 1 + self.blocks
        evict(self._tree, (end - blocks) * _LAYOUT.page, end * _LAYOUT.page)
        return self.blocks - self._resizer.tail_free

    def shrink(self, blocks: int) -> bool:
        return self._resizer.shrink(blocks)

    def grow(self, blocks: int) -> None:
        self._resizer.grow(blocks)

    def resize(self) -> float:
        """Lends blocks, reclaims them, and receives the master's answer; returns the seconds."""
        self._now += 1000.0  # the previous need is outside the window
        took = self._step(self._all - _BLOCKS)
        if self.blocks != self._all - _BLOCKS:
            raise AssertionError(f"{self.blocks} of {self._all} blocks remain after lending")
        self._answer()
        took += self._step(self._all)
        keep = self._answer()
        began = time.perf_counter()
        self._worker.receive(keep, self._now)
        took += time.perf_counter() - began + self._step(self._all)
        if self.blocks != self._all:
            raise AssertionError(f"{self.blocks} of {self._all} blocks exist after reclaiming")
        return took

    def _step(self, blocks: int) -> float:
        began = time.perf_counter()
        self._worker.step(blocks * _LAYOUT.page, self._now)
        _ = self._worker.message
        return time.perf_counter() - began

    def _answer(self) -> Any:
        self._borrower.receive(self._worker.message)
        self._borrower.used = self._borrower.size
        return self._borrower.message


def _scheduler(blocks: int) -> Any:
    """Returns a stand-in for the scheduler with the parts that hold and count KV."""
    import torch

    from sgl_ext.bench.harness.prefix_tree import prefix_tree
    from sgl_ext.engine.kv.allocator import BlockGroupAllocator
    from sgl_ext.engine.kv.resize import HOLDERS

    page, size = _LAYOUT.page, blocks * _LAYOUT.page
    allocator = BlockGroupAllocator(
        size, page, torch.float32, "cpu", None, False, expected_tokens=page
    )
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        tree_cache=prefix_tree(allocator),
        model_config=SimpleNamespace(context_len=size),
        **{name: SimpleNamespace(max_total_num_tokens=size) for name in HOLDERS},
    )


def _cache(tree: Any, allocator: Any, sequences: int) -> None:
    from sgl_ext.bench.harness.prefix_tree import insert

    tokens = _LENGTH * _LAYOUT.page
    for at in range(sequences):
        insert(tree, range(at * tokens, (at + 1) * tokens), allocator.alloc(tokens))
