"""Benchmark of ``peer``: cost of lending, longest request, TTFT, TPOT, and slowdown of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.peer.arrivals import ArrivalSizes, report_arrivals
from sgl_ext.bench.peer.context import report_context
from sgl_ext.bench.peer.decode import DecodeSizes, report_decode
from sgl_ext.bench.peer.interference import report_interference
from sgl_ext.bench.peer.resize import report_resize
from sgl_ext.bench.peer.servers import PAGE, Lent
from sgl_ext.bench.peer.ttft import TtftSizes, report_ttft

PARTS = ("resize", "context", "ttft", "arrivals", "decode", "interference")


@dataclass(frozen=True)
class _Sizes:
    local: int
    """Tokens of local KV memory in the part ``context``; the model has 8,192 positions."""
    ttft: TtftSizes
    rounds: int
    """Number of rounds of the worker's requests in each situation."""
    decode: DecodeSizes
    arrivals: ArrivalSizes


_QUICK = _Sizes(
    512, TtftSizes(3, 2, 1024, 2048, 6144), 3, DecodeSizes(512, 2048, (256, 1024), 2),
    ArrivalSizes(2, 3000, 4096, 8192, 4, (0,)),
)  # fmt: skip
_WHOLE = _Sizes(
    1904, TtftSizes(6, 8, 5632, 8192, 49_152), 6, DecodeSizes(1024, 6144, (640, 2048, 6144), 10),
    ArrivalSizes(3, 20_000, 28_672, 65_536, 9, (0, 1, 2)),
)  # fmt: skip


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    sizes = _QUICK if quick else _WHOLE
    report = Report("peer", {"quick": quick, "page": PAGE, **asdict(sizes)})
    logs = out / "logs" / "peer"
    if "resize" in parts:
        report_resize(report)
    if "context" in parts:
        report_context(report, sizes.local, _contexts(sizes.local), logs / "context")
    if "ttft" in parts:
        report_ttft(report, sizes.ttft, logs / "ttft")
    if "arrivals" in parts:
        report_arrivals(report, sizes.arrivals, logs / "arrivals")
    if "decode" in parts:
        report_decode(report, sizes.decode, logs / "decode")
    if "interference" in parts:
        setup = Lent(512, 6144, "direct")
        report_interference(report, setup, sizes.rounds, logs / "interference")
    return report


def _contexts(local: int) -> dict[str, Lent]:
    """Returns the setups of the part ``context``, by the name of the figure."""

    def lent(factor: float) -> int:
        return int(factor * local) // PAGE * PAGE

    return {
        "max_context_ratio": Lent(local, lent(3.25), "layer"),
        "max_context_ratio_w1": Lent(local, lent(1), "layer"),
        "max_context_ratio_tiled": Lent(local, lent(3), "direct"),
    }
