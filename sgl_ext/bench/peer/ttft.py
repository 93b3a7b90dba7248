"""TTFT of conversations whose prefixes exceed local memory (SwiftCache §5.1).

The prefixes are in a worker's memory, or in host memory with HiCache. On one machine both links are
memory copies. Both are therefore slowed down to the ratios of the paper's Figure 1: with 5,000
tokens of history, loading over PCIe takes 75 ms and computing 256 new tokens takes 27 ms; NVLink
has 400 GB/s and PCIe has 32 GB/s. Both systems overlap loads with computation, layer by layer. If
nothing else counts, the TTFT with a worker's memory is 27/75 of HiCache's at 5,000 tokens, and less
with a longer history. A second measurement leaves both links as they are.

The texts are ShareGPT's, cut into turns of equally many new tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.peer.servers import COMMON, PAGE, Lent, pair
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.progress import steps
from sgl_ext.serving.http import forget, live
from sgl_ext.serving.server import Server, System, serve

HISTORY, NEW = 5000, 256
LOAD_OVER_COMPUTE = 75 / 27
"""Ratio of loading ``HISTORY`` tokens to computing ``NEW`` tokens (Figure 1)."""
PEER_OVER_HOST = 400 / 32
_HICACHE_GB = 4
_PAUSE_S = 0.75
"""Pause between two requests, in seconds. HiCache writes to host memory after its answer, on the
same cores, which would slow down the next request."""
_SHAREGPT = (1500, 7500)
"""Least and most tokens of the conversations that texts are made of."""


@dataclass(frozen=True)
class TtftSizes:
    """Sizes of the measurement."""

    held: int
    """Number of conversations."""
    turns: int
    """Number of timed turns of each conversation."""
    history: int
    """Tokens before the first timed turn."""
    local: int
    """Tokens of local KV memory."""
    borrowed: int
    """Tokens that fit the memory that the worker lends."""


def report_ttft(report: Report, sizes: TtftSizes, logs: Path) -> None:
    """Adds runs and figures, with both links slowed down and as they are."""
    texts = texts_of(prepare(SMOLLM2), sizes.held, sizes.history + sizes.turns * NEW)
    compute, host = link_of(Lent(sizes.local, sizes.borrowed, "direct"), logs / "compute")
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
                "--hicache-size", str(_HICACHE_GB),
            ),
            {} if rate is None else {"SGLEXT_EMULATED_HICACHE": str(rate)},
        )  # fmt: skip
        with pair(setup, logs / name, beside=(hicache,)) as (master, _, other):
            times, waited = _timed({"peer": master, "hicache": other}, texts, sizes)
        for system, ttft in times.items():
            row = {"what": f"ttft, {name}", "system": system, "samples": len(ttft)}
            report.runs.append(row | summary(ttft, "ttft_ms", 1e3))
        ratio = p99(times["peer"]) / p99(times["hicache"])
        if rate is None:
            report.figures["p99_ttft_ratio_vs_hicache_native"] = ratio
            continue
        report.figures["p99_ttft_ratio_vs_hicache"] = ratio
        report.figures["load_share_exposed"] = waited / sum(times["peer"])


def texts_of(model: Path, count: int, length: int) -> list[list[int]]:
    """Returns texts of ``length`` tokens, as token ids ``[count][length]``."""
    each = -(-length // _SHAREGPT[0])
    parts = conversations(model, count * each, turns=1, tokens=_SHAREGPT)
    texts = [
        [*chain.from_iterable(part.heard[0] for part in parts[at * each : (at + 1) * each])]
        for at in range(count)
    ]
    return [text[:length] for text in texts]


def _timed(
    servers: dict[str, Server], texts: Sequence[Sequence[int]], sizes: TtftSizes
) -> tuple[dict[str, list[float]], float]:
    """Returns the TTFT of each system's requests, in seconds, and the wait for layers.

    The wait is the time that the master's forwards waited for layers during these requests, in
    seconds.
    """
    for server in servers.values():
        forget(server.url)
        for text in texts:
            _ask(server, text[: sizes.history])
    before = _waited(servers["peer"])
    found: dict[str, list[float]] = {name: [] for name in servers}
    for turn in steps(range(1, sizes.turns + 1), "turns"):
        for at, text in enumerate(texts):
            prompt = text[: sizes.history + turn * NEW]
            for name in list(servers)[:: 1 if (turn + at) % 2 else -1]:
                found[name].append(_ask(servers[name], prompt, cached=len(prompt) - NEW))
                time.sleep(_PAUSE_S)
    return found, _waited(servers["peer"]) - before


def _waited(master: Server) -> float:
    return float(live(master.url)["peer"].get("stream_waited_seconds", 0.0))


def _ask(server: Server, prompt: Sequence[int], cached: int = 0) -> float:
    """Returns the TTFT of a prompt, in seconds.

    Args:
        cached: number of tokens that must be cached, up to a page less.

    Raises:
        ExtError: fewer tokens were cached.
    """
    from sgl_ext.bench.harness.load_generator import Request, run

    (timing,) = run(server.url, [Request([*prompt], 1)])
    if timing.cached_tokens < cached - PAGE:
        raise ExtError(
            f"{server.system.name} had {timing.cached_tokens} of {cached} tokens in its caches, "
            "so the request did not measure loading"
        )
    return timing.ttft


def link_of(setup: Lent, logs: Path) -> tuple[float, int]:
    """Returns the speed of a link to host memory that has the ratios of the paper's Figure 1.

    Returns:
        The median seconds to compute ``NEW`` tokens behind ``HISTORY`` cached ones, and the bytes
        per second of the link.
    """
    compute = _compute_seconds(setup, logs)
    return compute, int(HISTORY * setup.token_bytes / (LOAD_OVER_COMPUTE * compute))


def _compute_seconds(setup: Lent, logs: Path) -> float:
    from sgl_ext.bench.harness.load_generator import Request, run

    chance = random.Random(0)  # noqa: S311
    ids = [chance.randrange(1000, 40_000) for _ in range(HISTORY)]
    system = System("alone", (*setup.arguments, "--max-total-tokens", "16384", "--enable-ext"))
    times = []
    with serve([system], setup.model, logs) as (server,):
        for _ in range(5):
            new = [chance.randrange(1000, 40_000) for _ in range(NEW)]
            (timing,) = run(server.url, [Request([*ids, *new], 1)])
            if timing.cached_tokens:
                times.append(timing.ttft)
    return statistics.median(times)


def p99(samples: Sequence[float]) -> float:
    """Returns the 99th percentile."""
    return statistics.quantiles(samples, n=100, method="inclusive")[98]
