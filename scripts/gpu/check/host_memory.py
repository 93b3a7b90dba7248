"""TTFT from host memory against HiCache's, and swap against recomputation, in an 8B shape."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gpu.check import models
from gpu.check.models import DUMMY
from gpu.check.outcome import Outcome, spread
from gpu.check.servers import arguments, extension, started, state, timed
from gpu.check.setup import Setup
from gpu.check.speed import interleaved

from sgl_ext.serving.server import Server, System

STOCK, TIERS, HICACHE = "memory-stock", "memory-tiers", "memory-hicache"
SWAP, RECOMPUTE = "memory-swap", "memory-recompute"
_RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"}


def run(setup: Setup, outcome: Outcome) -> None:
    """Serves all systems side by side, and measures them."""
    context = setup.scale(8192, 512)
    # The device holds two contexts of five.
    common = (*arguments(setup, 5 * context // 2, "bfloat16"), *DUMMY)
    common += ("--chunked-prefill-size", str(setup.scale(8192, 512)))
    host = {"tiers": {"host": {"capacity": f"{setup.scale(4, 1)}GiB"}}}
    swap = {**host, "swap": {"capacity": f"{setup.scale(2048, 256)}MiB"}}
    hicache = ("--enable-hierarchical-cache", "--hicache-size", str(setup.scale(4, 1)))
    systems = [
        System(STOCK, common),
        System(TIERS, (*common, *extension(host))),
        System(SWAP, (*common, *extension(swap)), _RETRACT),
        System(RECOMPUTE, common, _RETRACT),
    ]
    if setup.cuda and setup.stand_in:
        outcome.lack("HiCache", "its copies need the package sglang-kernel")
    else:
        systems.append(System(HICACHE, (*common, *hicache)))
    # Half of the layers, so that all systems fit the GPU.
    model = models.large(setup, max(1, setup.options.layers // 2))
    with started(setup, outcome, systems, model) as servers:
        if TIERS in servers:
            with outcome.step("evicted prefixes"):
                names = [name for name in (STOCK, TIERS, HICACHE) if name in servers]
                evicted(setup, outcome, {name: servers[name] for name in names}, context)
        if SWAP in servers and RECOMPUTE in servers:
            with outcome.step("preempted requests"):
                preempted(setup, outcome, servers[SWAP], servers[RECOMPUTE], context)


def evicted(setup: Setup, outcome: Outcome, servers: dict[str, Server], context: int) -> None:
    """Measures TTFT of contexts in turn, each of which the device evicts before its next turn."""
    chance = random.Random(setup.options.seed)  # noqa: S311
    prompts = [[chance.randrange(97, 123) for _ in range(context - 32)] for _ in range(5)]
    hits: dict[str, list[int]] = {name: [] for name in servers}

    def sample(name: str, number: int) -> float:
        prompt = prompts[number % len(prompts)]
        seconds, _, meta = timed(servers[name], prompt)
        if number >= len(prompts):
            hits[name].append((meta.get("cached_tokens_details") or {}).get("host", 0))
        return 1e3 * seconds

    rounds = setup.scale(4, 2) * len(prompts)
    calls = {name: partial(sample, name) for name in servers}
    found = interleaved(calls, rounds, skip=len(prompts))
    outcome.row(what="TTFT in ms", tokens=context, tokens_from_host=hits, **found)
    if not min(hits[TIERS]):
        outcome.fail("an evicted context was not found in host memory")
    if STOCK in found:
        ratio = found[STOCK]["median"] / found[TIERS]["median"]
        outcome.figure("TTFT from host memory, times faster than recomputed", ratio)
    if HICACHE in found:
        ratio = found[TIERS]["median"] / found[HICACHE]["median"]
        outcome.figure("TTFT from host memory to HiCache's", ratio, at_most=1.0)


def preempted(
    setup: Setup, outcome: Outcome, swap: Server, recompute: Server, context: int
) -> None:
    """Measures requests that SGLang retracts every few steps, from the first to the last token."""
    chance = random.Random(setup.options.seed)  # noqa: S311
    new = setup.scale(64, 40)

    def sample(server: Server) -> float:
        prompts = [[chance.randrange(97, 123) for _ in range(context // 4)] for _ in range(6)]
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: timed(server, prompt, new), prompts))
        return time.perf_counter() - begin

    seconds: dict[str, list[float]] = {SWAP: [], RECOMPUTE: []}
    for number in range(setup.scale(6, 1)):
        for server in (swap, recompute)[:: -1 if number % 2 else 1]:
            seconds[server.system.name].append(sample(server))
    found = {name: spread(times) for name, times in seconds.items()}
    counts = state(swap)["internal_states"][0]["sgl_ext"]["swap"]
    outcome.row(what="seconds of 6 requests", tokens=context // 4, new=new, swap=counts, **found)
    if not counts["swapped_in"]:
        outcome.fail("no request was swapped in")
    ratio = found[RECOMPUTE]["median"] / found[SWAP]["median"]
    outcome.figure("preempted requests, times faster than recomputed", ratio)
