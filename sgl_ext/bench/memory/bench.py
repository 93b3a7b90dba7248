"""Benchmark of the memory below the powers: attention over the slab, and transfers.

The compute-bound part runs first, so that nothing of this process competes with it.
"""

from __future__ import annotations

from pathlib import Path

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.memory import attention as memory_attention
from sgl_ext.bench.memory import transfer as memory_transfer


def run(*, quick: bool, out: Path) -> Report:
    memory_transfer.require_fio()
    report = Report("memory", {"quick": quick})
    memory_attention.measure(report, quick=quick)
    memory_transfer.measure(report, quick=quick, out=out)
    return report
