"""TTFT of turns that arrive as a Poisson process, behind 20,000 tokens each (SwiftCache §5.1).

Their KV is in a worker's memory, in host memory with HiCache, which loads it layer by layer during
the forward, or in host memory with ``tiers``, which loads it before the forward. Both links are
slowed down as in :mod:`~sgl_ext.bench.peer.ttft`. The servers run the first layers of SmolLM2 with
more positions than it was trained on: only times count.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio_of_medians
from sgl_ext.bench.peer.servers import Lent, pair
from sgl_ext.bench.peer.ttft import NEW, PEER_OVER_HOST, link_of, p99, texts_of
from sgl_ext.serving.http import wait_until_stored
from sgl_ext.serving.server import Server, System, extension

PEER, HICACHE, TIERS = "peer", "hicache", "tiers"
_LAYERS = 6
_POSITIONS = 32_768
_HOST_GB = 2
_LOAD = 0.6
"""Arrival rate, relative to what HiCache answers one after the other."""


@dataclass(frozen=True)
class ArrivalSizes:
    """Sizes of the measurement."""

    held: int
    """Number of conversations."""
    history: int
    """Tokens before the first timed turn."""
    local: int
    """Tokens of local KV memory."""
    borrowed: int
    """Tokens that fit the memory that the worker lends."""
    requests: int
    """Number of requests of each system and seed."""
    seeds: Sequence[int]
    """Seeds of the arrival times."""


def report_arrivals(report: Report, sizes: ArrivalSizes, logs: Path) -> None:
    """Adds runs and figures; see the module."""
    setup = Lent(sizes.local, sizes.borrowed, "layers", layers=_LAYERS, positions=_POSITIONS)
    turns = 1 + -(-sizes.requests * len(sizes.seeds) // sizes.held)
    texts = texts_of(setup.model, sizes.held, sizes.history + turns * NEW)
    _, host = link_of(setup, logs / "compute")
    peers = Lent(
        sizes.local, sizes.borrowed, "layers", int(host * PEER_OVER_HOST),
        layers=_LAYERS, positions=_POSITIONS,
    )  # fmt: skip
    with pair(peers, logs, beside=_others(setup, host)) as (master, _, hicache, tiers):
        servers = {PEER: master, HICACHE: hicache, TIERS: tiers}
        for server in servers.values():
            for text in texts:
                _ask(server, [(text[: sizes.history], 0.0)])
        # One turn of each conversation without others, which also gives the rate of the arrivals.
        alone: dict[str, list[float]] = {name: [] for name in servers}
        for text in texts:
            for name, server in servers.items():
                alone[name] += _ask(server, [(text[: sizes.history + NEW], 0.0)])
        rate = _LOAD / statistics.median(alone[HICACHE])
        found: dict[str, list[float]] = {name: [] for name in servers}
        for at, seed in enumerate(sizes.seeds):
            for name in [*servers][at % 3 :] + [*servers][: at % 3]:
                sent = _arrivals(texts, sizes, at, seed, rate)
                found[name] += _ask(servers[name], sent)
    for what, times in (("alone", alone), ("arrivals", found)):
        for name, ttft in times.items():
            row = {"what": what, "system": name, "samples": len(ttft), "arrivals_per_s": rate}
            report.runs.append(row | summary(ttft, "ttft_ms", 1e3))
    for name in (HICACHE, TIERS):
        report.figures[f"arrivals_p50_ttft_ratio_vs_{name}"] = ratio_of_medians(
            found[PEER], found[name]
        )
        report.figures[f"arrivals_p99_ttft_ratio_vs_{name}"] = p99(found[PEER]) / p99(found[name])


def _others(setup: Lent, host: int) -> tuple[System, System]:
    """Returns the systems with prefixes in host memory, behind a link of that speed."""
    base = (*setup.arguments, "--max-total-tokens", str(setup.local))
    section = {"capacity": f"{_HOST_GB}GiB", "link": {"bytes_per_second": host}}
    return (
        System(
            HICACHE,
            (*base, "--enable-hierarchical-cache", "--hicache-size", str(_HOST_GB)),
            {"SGLEXT_EMULATED_HICACHE": str(host)},
        ),
        System(
            TIERS,
            (*base, *extension({"tiers": {"host": section}})),
        ),
    )


def _arrivals(
    texts: Sequence[Sequence[int]], sizes: ArrivalSizes, round_: int, seed: int, rate: float
) -> list[tuple[Sequence[int], float]]:
    """Returns the prompts of a round and their arrival times in seconds, equal for all systems."""
    chance = random.Random(seed)  # noqa: S311
    found: list[tuple[Sequence[int], float]] = []
    at = 0.0
    for number in range(round_ * sizes.requests, (round_ + 1) * sizes.requests):
        turn, which = divmod(number, sizes.held)
        found.append((texts[which][: sizes.history + (turn + 2) * NEW], at))
        at += chance.expovariate(rate)
    return found


def _ask(server: Server, sent: Sequence[tuple[Sequence[int], float]]) -> list[float]:
    """Sends prompts at their times; returns the TTFT of each, in seconds.

    Then waits until what host memory is given is there.
    """
    from sgl_ext.bench.harness.load_generator import Request, run

    timings = run(server.url, [Request([*prompt], 1, at) for prompt, at in sent])
    wait_until_stored(server.url)
    return [timing.ttft for timing in timings]
