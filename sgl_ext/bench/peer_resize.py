"""What it takes to lend a unit and to have it back, in a small pool and in a large one (§3.4)."""

from __future__ import annotations

import statistics
import time

from sgl_ext.bench.report import Report
from sgl_ext.memory.block_groups import BlockGroups

_SMALL, _LARGE = 1_000, 100_000
_BLOCKS = 8
_REPEATS = 2_000


def report_resize(report: Report) -> None:
    """Adds the microseconds of both pools, half of whose blocks are in use, and their ratio."""
    pools = {blocks: _pool(blocks) for blocks in (_SMALL, _LARGE)}
    times: dict[int, list[float]] = {blocks: [] for blocks in pools}
    for _ in range(_REPEATS):
        for blocks, groups in pools.items():
            began = time.perf_counter()
            groups.shrink(_BLOCKS)
            groups.grow(_BLOCKS)
            times[blocks].append(time.perf_counter() - began)
    for blocks, each in times.items():
        report.runs.append(
            {
                "what": "resize",
                "blocks": blocks,
                "samples": len(each),
                "resize_us_p50": 1e6 * statistics.median(each),
            }
        )
    large, small = (statistics.median(times[blocks]) for blocks in (_LARGE, _SMALL))
    report.figures["resize_us_ratio"] = large / small


def _pool(blocks: int) -> BlockGroups:
    groups = BlockGroups(blocks, page=1, expected_tokens=1)
    owners = range(0, blocks // 2, 10)
    groups.allocate([(owner, 10) for owner in owners])
    groups.release([(1 + owner, 5) for owner in owners[::2]])
    return groups
