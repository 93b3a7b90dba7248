"""Benchmark of the memory below the powers: attention over the slab, transfers, block groups.

The compute-bound part runs first, so that nothing of this process competes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.memory import attention as memory_attention
from sgl_ext.bench.memory import granularity as memory_granularity
from sgl_ext.bench.memory import transfer as memory_transfer

PARTS = ("attention", "transfer", "groups")


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    if "transfer" in parts:
        memory_transfer.require_fio()
    report = Report("memory", {"quick": quick})
    if "attention" in parts:
        memory_attention.measure(report, quick=quick)
    if "transfer" in parts:
        memory_transfer.measure(report, quick=quick, out=out)
    if "groups" in parts:
        memory_granularity.measure(report, quick=quick)
    return report
