"""Overhead of all sections when they have nothing to do, against stock SGLang."""

from __future__ import annotations

from pathlib import Path

from sgl_ext.bench import overhead
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together.systems import ALL, STOCK, Memory, scratch

_MEMORY = Memory(pool=32_768, host=32_768)
_PROCESSES = 2


def report_idle(report: Report, out: Path, *, quick: bool) -> None:
    """Adds ``idle_ttft_ratio`` and ``idle_tpot_ratio``: short prompts, none of them cached."""
    first, answers = overhead.rounds(quick=quick)
    with scratch(out) as places:
        systems = {
            name: [_MEMORY.system(name, places).arguments for _ in range(_PROCESSES)]
            for name in (STOCK, ALL)
        }
        overhead.measure(report, systems, first, answers, out / "logs" / "idle", prefix="idle_")
