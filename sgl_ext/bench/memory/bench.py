"""The floor under every power: where KV lies, how it is handed out, how its bytes move.

The compute-bound parts run first, so that nothing of this process competes with them.
"""

from __future__ import annotations

from pathlib import Path

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.memory import attention as memory_attention
from sgl_ext.bench.memory import granularity as memory_granularity
from sgl_ext.bench.memory import transfer as memory_transfer


def run(*, quick: bool, out: Path) -> Report:
    memory_transfer.require_fio()
    report = Report("memory", {"quick": quick})
    memory_attention.measure(report, quick=quick)
    memory_transfer.measure(report, quick=quick, out=out)
    memory_granularity.measure(report, quick=quick)
    return report
