"""Conversations whose prefixes exceed local memory: in a worker's memory, or in host memory with
HiCache (SwiftCache §5.1).

On one machine both ways are memory copies. So both are slowed down until loading stands to
computing as in the paper's Figure 1: at 5,000 tokens of history, loading over PCIe takes 75 ms
where computing 256 new tokens takes 27 ms, and NVLink has 400 GB/s where PCIe has 32. Loads overlap
with computing, layer by layer, in both. Once more without slowing anything down, as it is.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_ext.bench.conversations import Conversation, conversations
from sgl_ext.bench.peer_servers import COMMON, TOKEN_BYTES, Lent, pair
from sgl_ext.bench.report import Report, summary
from sgl_ext.bench.server import Server, System, forget, live, serve
from sgl_ext.models import SMOLLM2, prepare

HISTORY, NEW = 5000, 256
LOAD_OVER_COMPUTE = 75 / 27
"""At that history and so many new tokens (Figure 1)."""
PEER_OVER_HOST = 400 / 32
_HICACHE_GIB = 2
_ANSWER = 1
_WARM = 2
"""Turns that are not timed: nothing is cached before the first one."""


@dataclass(frozen=True)
class TtftSizes:
    """How much is measured."""

    held: int
    """Conversations."""
    turns: int
    tokens: tuple[int, int]
    """Least and most of a turn's prompt."""
    local: int
    """Tokens of local KV memory."""
    borrowed: int


def report_ttft(report: Report, sizes: TtftSizes, logs: Path) -> None:
    """Adds runs and figures, with both ways slowed down and as they are."""
    model = prepare(SMOLLM2)
    held = conversations(model, sizes.held, turns=sizes.turns, tokens=sizes.tokens)
    compute = _compute_seconds(model, logs / "compute")
    host = int(HISTORY * TOKEN_BYTES / (LOAD_OVER_COMPUTE * compute))
    report.runs.append(
        {
            "what": "link",
            "compute_256_at_5000_s": compute,
            "host_bytes_per_s": host,
            "peer_bytes_per_s": int(host * PEER_OVER_HOST),
        }
    )
    for name, rate in (("throttled", host), ("native", None)):
        setup = Lent(
            sizes.local, sizes.borrowed, "layers" if rate else "direct",
            None if rate is None else int(rate * PEER_OVER_HOST),
        )  # fmt: skip
        hicache = System(
            "hicache",
            (
                *COMMON, "--max-total-tokens", str(sizes.local), "--enable-hierarchical-cache",
                "--hicache-size", str(_HICACHE_GIB),
            ),
            {} if rate is None else {"SGL_EXT_EMULATED_HICACHE": str(rate)},
        )  # fmt: skip
        with pair(setup, logs / name, beside=(hicache,)) as (master, _, other):
            times = {"hicache": _hold(other, held)}
            times["peer"], waited = _watched(master, held)
        for system, ttft in times.items():
            row = {"what": f"ttft, {name}", "system": system, "samples": len(ttft)}
            report.runs.append(row | summary(ttft, "ttft_ms", 1e3))
        ratio = _p99(times["peer"]) / _p99(times["hicache"])
        if rate is None:
            report.figures["p99_ttft_ratio_vs_hicache_native"] = ratio
            continue
        report.figures["p99_ttft_ratio_vs_hicache"] = ratio
        report.figures["load_share_exposed"] = waited / sum(times["peer"])


def _hold(server: Server, held: Sequence[Conversation]) -> list[float]:
    """Times to the first token of the turns that are timed, one conversation after the other."""
    forget(server.url)
    turns = range(len(held[0].prompts))
    return [ttft for turn in turns for ttft in _turn(server, held, turn) if turn >= _WARM]


def _watched(master: Server, held: Sequence[Conversation]) -> tuple[list[float], float]:
    """The same, and the seconds that its forwards waited for layers meanwhile."""
    forget(master.url)
    for turn in range(_WARM):
        _turn(master, held, turn)
    before = _waited(master)
    turns = range(_WARM, len(held[0].prompts))
    times = [ttft for turn in turns for ttft in _turn(master, held, turn)]
    return times, _waited(master) - before


def _waited(master: Server) -> float:
    return float(live(master.url)["peer"].get("stream_waited_seconds", 0.0))


def _turn(server: Server, held: Sequence[Conversation], turn: int) -> list[float]:
    from sgl_ext.engine.load_generator import Request, run

    prompts = [Request(each.prompts[turn], _ANSWER) for each in held]
    return [timing.ttft for timing in run(server.url, prompts, concurrency=1)]


def _compute_seconds(model: Path, logs: Path) -> float:
    """To compute so many new tokens with that history in memory."""
    from sgl_ext.engine.load_generator import Request, run

    chance = random.Random(0)  # noqa: S311
    ids = [chance.randrange(1000, 40_000) for _ in range(HISTORY)]
    system = System("alone", (*COMMON, "--max-total-tokens", "16384", "--enable-ext"))
    times = []
    with serve([system], model, logs) as (server,):
        for _ in range(5):
            new = [chance.randrange(1000, 40_000) for _ in range(NEW)]
            (timing,) = run(server.url, [Request([*ids, *new], 1)])
            if timing.cached_tokens:
                times.append(timing.ttft)
    return statistics.median(times)


def _p99(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[98]
