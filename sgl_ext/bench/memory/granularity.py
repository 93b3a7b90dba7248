"""Blocks per swap operation, and the cost of resizing the pool.

``granularity_blocks``: blocks that one copy of a swap moves (all blocks by all operations), on
FastSwitch's setting, which reports about 20; see ``swap_trace``. The mean of the patterns *random*
and *markov*. One operation copies what is contiguous in the pool and in host memory (60 GB, handed
out by the same allocator). Compared: single blocks (vLLM), and SGLang's paged allocator, for which
accidental neighbours count as one operation and host memory as contiguous. Its free list gets freed
pages at the front, ascending as ``torch.unique`` leaves them; with ``need_sort`` (disaggregation
only) they wait until it runs short, and all are sorted.

``resize_us``: growing and shrinking by 32 blocks in the block-major layout, beside what moving the
blocks would take in a layer-major one (SwiftCache §3.4).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import mean, median
from typing import Protocol, get_args

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, ratio_of_medians
from sgl_ext.bench.swap.trace import BLOCKS, PAGE, Pattern, Step, sharegpt_turns, simulate
from sgl_ext.memory.block_groups import BlockGroups, Run
from sgl_ext.memory.slab import Layout

_HOST_BLOCKS = 60 * 10**9 // (2 << 20)
_RESIZED = 32
_SMOLLM2 = Layout(
    page=PAGE, layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", fingerprint="SmolLM2"
)


def measure(report: Report, *, quick: bool) -> None:
    """Adds this module's figures and runs."""
    _granularity(report, seeds=1 if quick else 3)
    _resize(report, rounds=300 if quick else 3000)
    _layer_major(report, rounds=2 if quick else 10)


class _Pool(Protocol):
    """An allocator under a trace. Runs are in the order of the sequence's tokens."""

    name: str

    def allocate(self, requests: Sequence[tuple[int, int]]) -> list[list[Run]]: ...
    def append(self, owners: Sequence[int]) -> list[int]: ...
    def close(self, owner: int) -> None: ...
    def release(self, runs: list[Run]) -> None: ...
    def swap_out(self, owner: int, runs: list[Run]) -> int: ...
    def swap_in(self, owner: int, runs: list[Run]) -> int: ...


class _Grouped:
    name = "block groups"

    def __init__(self) -> None:
        self._device = BlockGroups(BLOCKS, page=PAGE)
        self._host = BlockGroups(_HOST_BLOCKS, page=PAGE)
        self._copies: dict[int, list[Run]] = {}
        self.close = self._device.close
        self.release = self._device.release

    def allocate(self, requests: Sequence[tuple[int, int]]) -> list[list[Run]]:
        runs = self._device.allocate(requests)
        assert runs is not None  # noqa: S101  (the trace never asks for more than is free)
        return runs

    def append(self, owners: Sequence[int]) -> list[int]:
        blocks = self._device.append(owners)
        assert blocks is not None  # noqa: S101
        return blocks

    def swap_out(self, owner: int, runs: list[Run]) -> int:
        (copy,) = self._host.allocate([(None, sum(run.length for run in runs))]) or [[]]
        self._copies[owner] = copy
        return _operations(runs, copy)

    def swap_in(self, owner: int, runs: list[Run]) -> int:
        copy = self._copies.pop(owner)
        self._host.release(copy)
        return _operations(runs, copy)


class _FreeList:
    name = "sglang free list"

    def __init__(self) -> None:
        self._free = list(range(BLOCKS, 0, -1))  # the front of the list is its end

    def allocate(self, requests: Sequence[tuple[int, int]]) -> list[list[Run]]:
        result = []
        for owner, blocks in requests:
            runs: list[Run] = []
            for block in self.append([owner] * blocks):
                _extend(runs, Run(block, 1))
            result.append(runs)
        return result

    def append(self, owners: Sequence[int]) -> list[int]:
        return [self._free.pop() for _ in owners]

    def close(self, owner: int) -> None:
        pass

    def release(self, runs: list[Run]) -> None:
        pages = [block for start, length in runs for block in range(start, start + length)]
        self._free += sorted(pages, reverse=True)

    def swap_out(self, owner: int, runs: list[Run]) -> int:  # noqa: ARG002
        return len(runs)

    swap_in = swap_out


class _SortedFreeList(_FreeList):
    name = "sglang sorted free list"

    def __init__(self) -> None:
        super().__init__()
        self._staged: list[int] = []

    def append(self, owners: Sequence[int]) -> list[int]:
        if len(owners) > len(self._free):
            self._free = sorted(self._free + self._staged, reverse=True)
            self._staged = []
        return super().append(owners)

    def release(self, runs: list[Run]) -> None:
        for start, length in runs:
            self._staged += range(start, start + length)


def _operations(device: Iterable[Run], host: Iterable[Run]) -> int:
    """Copies of what is contiguous on both sides."""
    cuts = (set(accumulate(run.length for run in runs)) for runs in (device, host))
    return len(set.union(*cuts))


def _extend(runs: list[Run], more: Run) -> None:
    if runs and runs[-1].start + runs[-1].length == more.start:
        runs[-1] = Run(runs[-1].start, runs[-1].length + more.length)
    else:
        runs.append(more)


@dataclass
class _Moved:
    blocks: int = 0
    operations: int = 0

    def add(self, runs: Iterable[Run], operations: int) -> None:
        self.blocks += sum(run.length for run in runs)
        self.operations += operations


def replay(steps: Iterable[Step], pool: _Pool) -> tuple[_Moved, _Moved]:
    """What the trace swaps out of and into ``pool``."""
    held: dict[int, list[Run]] = {}
    out, back = _Moved(), _Moved()
    for step in steps:
        for owner in step.swap_out:
            pool.close(owner)
            runs = held.pop(owner)
            out.add(runs, pool.swap_out(owner, runs))
            pool.release(runs)
        admitted = pool.allocate([(each.owner, each.blocks) for each in step.admit])
        for (owner, _, swapped_in), runs in zip(step.admit, admitted, strict=True):
            if swapped_in:
                back.add(runs, pool.swap_in(owner, runs))
            for run in runs:
                _extend(held.setdefault(owner, []), run)
        for owner, block in zip(step.append, pool.append(step.append), strict=True):
            _extend(held[owner], Run(block, 1))
        for owner in step.close:
            pool.close(owner)
        for owner in step.free:
            pool.close(owner)
            pool.release(held.pop(owner))
    return out, back


def _granularity(report: Report, seeds: int) -> None:
    means: dict[tuple[str, bool], list[float]] = {}
    for seed in range(seeds):
        conversations = sharegpt_turns(1000, seed)
        for keep_idle in (False, True):
            for pattern in get_args(Pattern):
                steps = list(simulate(conversations, pattern, seed=seed, keep_idle=keep_idle))
                setting = {
                    "what": "swap granularity",
                    "pattern": pattern,
                    "between turns": "kept until needed" if keep_idle else "swapped out",
                    "seed": seed,
                }
                for pool in (_Grouped(), _FreeList(), _SortedFreeList()):
                    out, back = replay(steps, pool)
                    blocks = out.blocks + back.blocks
                    granularity = blocks / (out.operations + back.operations)
                    means.setdefault((pool.name, keep_idle), []).append(granularity)
                    report.runs.append(
                        setting
                        | {"system": pool.name, "blocks_per_operation": granularity}
                        | {"out": out.blocks / out.operations, "in": back.blocks / back.operations}
                        | {"swapped_blocks": blocks}
                    )
    report.runs.append(
        {"what": "swap granularity", "system": "single blocks", "blocks_per_operation": 1.0}
    )
    grouped = mean(means[_Grouped.name, False])
    report.figures["granularity_blocks"] = grouped
    report.figures["granularity_over_sglang"] = grouped / mean(means[_FreeList.name, False])
    report.figures["granularity_blocks_kept"] = mean(means[_Grouped.name, True])


def _resize(report: Report, rounds: int) -> None:
    sizes = (1_000, 1_000_000)
    times = interleaved([partial(_resize_once, _used_pool(size)) for size in sizes], rounds)
    for size, samples in zip(sizes, times, strict=True):
        report.runs.append(
            {"what": f"grow and shrink by {_RESIZED}", "system": "block-major", "blocks": size}
            | summary(samples, "us", 1e6)
        )
    report.figures["resize_us_1k"] = median(times[0]) * 1e6
    report.figures["resize_us_1m"] = median(times[1]) * 1e6
    report.figures["resize_ratio"] = ratio_of_medians(times[1], times[0])


def _used_pool(blocks: int) -> BlockGroups:
    """Three quarters in use, with 20 holes."""
    groups = BlockGroups(blocks, capacity=blocks + _RESIZED)
    groups.allocate([(None, blocks * 3 // 4)])
    groups.release([(1 + hole * blocks // 40, 5) for hole in range(20)])
    return groups


def _resize_once(groups: BlockGroups, _round: int, repeats: int = 32) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        groups.grow(_RESIZED)
        groups.shrink(_RESIZED)
    return (time.perf_counter() - start) / repeats


def _layer_major(report: Report, rounds: int, blocks: int = 1_000) -> None:
    """Closes and reopens the gaps that 32 blocks leave in ``[layers, blocks, ...]``: memmove."""
    layers = _SMOLLM2.layers
    row = _SMOLLM2.block_bytes // layers
    pool = bytearray(blocks * row * layers)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    wide, narrow = blocks * row, (blocks - _RESIZED) * row

    def resize(_round: int) -> float:
        start = time.perf_counter()
        for layer in range(1, layers):
            ctypes.memmove(address + layer * narrow, address + layer * wide, narrow)
        for layer in range(layers - 1, 0, -1):
            ctypes.memmove(address + layer * wide, address + layer * narrow, narrow)
        return time.perf_counter() - start

    resize(0)  # the pool's pages come into being
    (samples,) = interleaved([resize], rounds)
    report.runs.append(
        {"what": f"grow and shrink by {_RESIZED}", "system": "layer-major", "blocks": blocks}
        | summary(samples, "us", 1e6)
    )
