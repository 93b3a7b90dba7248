"""Cost of the extension without sections, and TTFT of linked chunks, on a model of 8B shape.

Servers run in bfloat16 with CUDA graphs. Rounds alternate between them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

from gpu.check import models
from gpu.check.models import DUMMY
from gpu.check.outcome import Outcome, spread
from gpu.check.servers import arguments, extension, started, timed
from gpu.check.setup import Setup

from sgl_ext.serving.server import Server, System

STOCK, IDLE, LINKED = "speed-stock", "speed-idle", "speed-chunks"
_CHUNKS = 8
_IDLE_AT_MOST = 1.01
_FASTER_AT_LEAST = 8.0
_LOOSE = {"chunks": {"method": "lego-16", "largest_divergence": 1000.0}}
"""A model of random weights is not fit for linked chunks."""


def run(setup: Setup, outcome: Outcome) -> None:
    """Serves stock SGLang, the extension without sections, and chunks, and measures them."""
    pool = setup.scale(28672, 4096)
    common = (*arguments(setup, pool, "bfloat16"), *DUMMY)
    # A prompt of 8k tokens is one forward.
    common += ("--chunked-prefill-size", str(setup.scale(8192, 2048)))
    systems = [
        System(STOCK, common),
        System(IDLE, (*common, *extension({}))),
        System(LINKED, (*common, *extension(_LOOSE))),
    ]
    with started(setup, outcome, systems, models.large(setup, setup.options.layers)) as servers:
        if STOCK in servers and IDLE in servers:
            with outcome.step("idle cost"):
                idle_cost(setup, outcome, servers[STOCK], servers[IDLE])
        if STOCK in servers and LINKED in servers:
            with outcome.step("linked"):
                linked(setup, outcome, servers[STOCK], servers[LINKED])


def idle_cost(setup: Setup, outcome: Outcome, stock: Server, ours: Server) -> None:
    """Measures TTFT and TPOT of short prompts."""
    chance = random.Random(setup.options.seed)  # noqa: S311
    servers = {"stock": stock, "extension": ours}
    for what, new, rounds in (
        ("ttft", 1, setup.scale(100, 2)),
        ("tpot", setup.scale(64, 4), setup.scale(20, 2)),
    ):
        prompts = [[chance.randrange(97, 123) for _ in range(96)] for _ in range(rounds + 3)]

        def sample(
            server: Server,
            number: int,
            new: int = new,
            prompts: list[list[int]] = prompts,
        ) -> float:
            first, rest, _ = timed(server, prompts[number], new)
            return 1e3 * (first if new == 1 else rest)

        calls = {name: partial(sample, server) for name, server in servers.items()}
        found = interleaved(calls, len(prompts), skip=3)
        outcome.row(what=f"{what} in ms, 96 tokens", **found)
        ratio = found["extension"]["median"] / found["stock"]["median"]
        outcome.figure(f"idle {what}", ratio, at_most=_IDLE_AT_MOST)


def linked(setup: Setup, outcome: Outcome, stock: Server, ours: Server) -> None:
    """Measures TTFT of prompts of 8k tokens that are eight chunks in changing orders."""
    from sgl_ext.client import ContextCache
    from sgl_ext.marks import mark

    chance = random.Random(setup.options.seed)  # noqa: S311
    size = setup.scale(1000, 100)
    texts = ["".join(chr(chance.randrange(97, 123)) for _ in range(size)) for _ in range(_CHUNKS)]
    contexts = ContextCache(ours.url, timeout=60).create(texts)
    orders = [chance.sample(range(_CHUNKS), _CHUNKS) for _ in range(setup.scale(12, 2))]
    marks = [mark(context.id) for context in contexts]
    shares: list[float] = []

    def text(number: int, parts: list[str]) -> str:
        # Another beginning each time, so that no prefix is cached.
        return f"{number} documents: {''.join(parts[at] for at in orders[number])} Well?"

    def recomputed(number: int) -> float:
        return 1e3 * timed(stock, text(number, texts))[0]

    def link(number: int) -> float:
        seconds, _, meta = timed(ours, text(number, marks))
        entries = [each for each in meta.get("ext") or [] if each["power"] == "chunks"]
        shares.append(sum(each["linked"] for each in entries) / meta["prompt_tokens"])
        return 1e3 * seconds

    skip = setup.scale(2, 0)
    found = interleaved({"recomputed": recomputed, "linked": link}, len(orders), skip=skip)
    outcome.row(what="TTFT in ms", tokens=_CHUNKS * size, linked_share=shares, **found)
    if min(shares) == 0:
        outcome.fail("a prompt was not linked")
    ratio = found["recomputed"]["median"] / found["linked"]["median"]
    outcome.figure("linked TTFT, times faster", ratio, at_least=_FASTER_AT_LEAST)


def interleaved(
    calls: Mapping[str, Callable[[int], float]], rounds: int, skip: int = 0
) -> dict[str, dict[str, float]]:
    """Returns the spread of each call's samples; rounds begin with the next call in turn.

    Args:
        calls: take one sample, given the number of the round.
        skip: rounds at the beginning that do not count.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(calls[name](number))
    return {name: spread(found[skip:]) for name, found in samples.items()}
