"""Benchmark of ``tiers`` against recomputing and HiCache, on multi-turn conversations.

The device pool of each system holds a part of the KV of all conversations. They are continued turn
by turn, so that the device has evicted the KV of a conversation before its next turn. Further
conversations, which fit the device, are held one at a time. They measure the overhead of tiers.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sgl_ext.bench.data.conversations import Conversation, conversations
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio_of_medians
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.progress import steps
from sgl_ext.serving import server

if TYPE_CHECKING:
    from sgl_ext.bench.harness.load_generator import Timing

RECOMPUTE, OURS = "recompute", "host+ssd"

_PAGE = 16
_HOST_GIB = 2
_RESIDENT_HOST_GIB = 0.5
"""Host memory for resident turns, in GiB. It is small, so that all of it is used before turns are
timed."""
_OUTPUT_TOKENS = 4
_RESIDENT_OUTPUT_TOKENS = 12


def run(*, quick: bool, out: Path) -> Report:
    model = prepare(SMOLLM2)
    if quick:
        held = conversations(model, 3, turns=3, tokens=(2000, 3400))
        resident = conversations(model, 7, turns=2, tokens=(300, 900), but=held)
        pool = 6144
    else:
        held = conversations(model, 12, turns=4, tokens=(2000, 4000))
        held += conversations(model, 6, turns=4, tokens=(3800, 6000), but=held)
        resident = conversations(model, 24, turns=3, tokens=(1000, 3000), but=held)
        pool = 16384
    report = Report(
        "tiers",
        {
            "quick": quick,
            "conversations": len(held),
            "turns": len(held[0].prompts),
            "device_pool_tokens": pool,
            "all_tokens": sum(len(each.prompts[-1]) for each in held),
            "page": _PAGE,
            "host_gib": _HOST_GIB,
            "output_tokens": _OUTPUT_TOKENS,
        },
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix="tiers-") as scratch:
        systems = _systems(pool, Path(scratch))
        if quick:  # the start of six servers would take two minutes
            systems = [each for each in systems if each.name not in ("host", "ssd")]
        with server.serve(systems, model, out / "logs") as servers:
            _warm_up(servers, resident)
            timings = _by_turns(servers, held)
            _report_held(report, timings, held)
        _report_resident(
            report,
            model,
            out / "logs",
            partial(_systems, pool, Path(scratch), host_gib=_RESIDENT_HOST_GIB),
            resident,
            held[:10],
            rounds=1 if quick else 3,
        )
    return report


def _warm_up(servers: Sequence[server.Server], conversations: Sequence[Conversation]) -> None:
    """Sends the first requests of each process, which are slow."""
    for prompt in conversations[0].prompts:
        _ask(servers, prompt, _OUTPUT_TOKENS)


def _systems(pool: int, scratch: Path, host_gib: float = _HOST_GIB) -> list[server.System]:
    base = ("--max-total-tokens", str(pool), "--page-size", str(_PAGE))
    hicache = ("--enable-hierarchical-cache", "--hicache-size", str(host_gib))
    files = scratch / "hicache"
    stored = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy")
    host = {"capacity": f"{host_gib}GiB"}

    def ssd(**more: object) -> dict[str, object]:
        directory = tempfile.mkdtemp(dir=scratch, prefix="ssd-")
        return {"directories": [directory], "capacity": "8GiB", **more}

    def ours(name: str, **tiers: object) -> server.System:
        return server.System(name, (*base, *server.extension({"tiers": tiers})))

    files.mkdir(exist_ok=True)
    return [
        server.System(RECOMPUTE, base),
        server.System("hicache-host", (*base, *hicache)),
        server.System(
            "hicache-file",
            # HiCache's host pool cannot be smaller than the device's.
            (
                *base,
                "--enable-hierarchical-cache",
                "--hicache-ratio",
                "1.1",
                *stored,
                "wait_complete",
            ),
            {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(files)},
        ),
        ours("host", host=host),
        ours("ssd", ssd=ssd(keep_after=1), staging="128MiB"),
        ours(OURS, host=host, ssd=ssd()),
    ]


def _ask(
    servers: Sequence[server.Server], prompt: Sequence[int], output_tokens: int, first: int = 0
) -> list[Timing]:
    """Sends one prompt to every server in turn and returns the timings in the order of ``servers``.

    Args:
        first: number of the server that is first, modulo the number of servers.
    """
    from sgl_ext.bench.harness.load_generator import Request
    from sgl_ext.bench.harness.load_generator import run as send

    request = Request(prompt, output_tokens)
    begin = first % len(servers)
    timings = {
        at: send(servers[at].url, [request])[0]
        for at in (*range(begin, len(servers)), *range(begin))
    }
    return [timings[at] for at in range(len(servers))]


def _by_turns(
    servers: Sequence[server.Server], held: Sequence[Conversation]
) -> dict[str, list[Timing]]:
    """Sends the first turn of every conversation, then the second one of every conversation, etc.

    Returns:
        Timings of the turns after the first, by system.
    """
    timings: dict[str, list[Timing]] = {each.system.name: [] for each in servers}
    # A system that recomputes every prompt does not need the KV of earlier turns.
    with_memory = [each for each in servers if each.system.name != RECOMPUTE]
    for turn in steps(range(len(held[0].prompts)), "turns of all conversations"):
        for number, conversation in enumerate(held):
            if turn:
                answers = _ask(servers, conversation.prompts[turn], _OUTPUT_TOKENS, number)
                for running, timing in zip(servers, answers, strict=True):
                    timings[running.system.name].append(timing)
            if turn + 1 < len(conversation.prompts):
                _ask(with_memory, conversation.heard[turn], 1, number)
    return timings


def _one_at_a_time(
    servers: Sequence[server.Server], resident: Sequence[Conversation]
) -> dict[str, list[Timing]]:
    timings: dict[str, list[Timing]] = {each.system.name: [] for each in servers}
    for number, conversation in enumerate(resident):
        for turn, prompt in enumerate(conversation.prompts):
            answers = _ask(servers, prompt, _RESIDENT_OUTPUT_TOKENS, number)
            for running, timing in zip(servers, answers, strict=True):
                if turn:
                    timings[running.system.name].append(timing)
    return timings


def _report_held(
    report: Report, timings: dict[str, list[Timing]], held: Sequence[Conversation]
) -> None:
    asked = sum(len(prompt) for each in held for prompt in each.prompts[1:])
    ttft = {name: [timing.ttft for timing in each] for name, each in timings.items()}
    for name, each in timings.items():
        cached = sum(timing.cached_tokens for timing in each)
        report.runs.append(
            {"what": "turns after the first", "system": name, "samples": len(each)}
            | summary(ttft[name], "ttft_ms", 1e3)
            | {"hit_rate": cached / asked, "recomputed_tokens": asked - cached}
        )
    ours = ttft[OURS]
    for name in ttft.keys() & {"host", "ssd", OURS}:
        suffix = "" if name == OURS else f"_{name}"
        report.figures[f"ttft_p50_ratio_vs_recompute{suffix}"] = ratio_of_medians(
            ttft[name], ttft[RECOMPUTE]
        )
    p99 = {name: float(np.percentile(each, 99)) for name, each in ttft.items()}
    report.figures["ttft_p99_ratio_vs_hicache_host"] = p99[OURS] / p99["hicache-host"]
    report.figures["ttft_p50_ratio_vs_hicache_file"] = ratio_of_medians(ours, ttft["hicache-file"])
    if "ssd" in ttft:
        report.figures["ttft_p50_ratio_ssd_vs_hicache_file"] = ratio_of_medians(
            ttft["ssd"], ttft["hicache-file"]
        )


def _report_resident(
    report: Report,
    model: Path,
    logs: Path,
    systems: Callable[[], Sequence[server.System]],
    resident: Sequence[Conversation],
    before: Sequence[Conversation],
    *,
    rounds: int,
) -> None:
    """Adds the overhead of tiers for turns whose KV is still on the device.

    Turns differ more from each other than systems do, so systems are compared turn by turn. Two
    processes of one system differ by a few percent throughout their lifetime, so several processes
    of each are compared. Memory is slow on first use, so all of it is used before anything is
    timed.

    Args:
        systems: creates the systems of a round, with new directories.
        resident: conversations that are timed.
        before: conversations that fill the memory beforehand.
        rounds: number of processes of each system.
    """
    latency: dict[str, list[float]] = {RECOMPUTE: [], OURS: []}
    ratios = []
    for number in steps(range(rounds), "rounds of resident conversations"):
        pair = [each for each in systems() if each.name in latency]
        with server.serve(pair[:: 1 - number % 2 * 2], model, logs) as servers:
            for conversation in before:
                _ask(servers, conversation.prompts[-1], 1)
            timings = _one_at_a_time(servers, resident[number::rounds])
        turns = {name: [each.latency for each in timings[name]] for name in latency}
        for name, seconds in turns.items():
            latency[name] += seconds
        ratios.append(float(np.median(np.divide(turns[OURS], turns[RECOMPUTE]))))
    for name, seconds in latency.items():
        report.runs.append(
            {"what": "resident turns", "system": name, "samples": len(seconds)}
            | summary(seconds, "latency_ms", 1e3)
        )
    report.runs.append(
        {"what": "overhead by pair of processes", "ratios": [round(each, 3) for each in ratios]}
    )
    report.figures["overhead_all_resident"] = statistics.geometric_mean(ratios)
