"""A master and a worker on one GPU: equal answers in lent memory, and its speed.

A GPU's memory is lent in pieces, of which the worker keeps the first one.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from gpu.check import models
from gpu.check.equal import TIE, judge
from gpu.check.models import PAGE, VOCABULARY
from gpu.check.outcome import Outcome, spread
from gpu.check.servers import (
    STRICT,
    Ids,
    arguments,
    ask,
    ask_all,
    extension,
    leak,
    started,
    timed,
)
from gpu.check.setup import Setup

from sgl_ext.memory.device_slab import PIECE
from sgl_ext.serving.http import live
from sgl_ext.serving.server import Server, System

_TOKEN_BYTES = 2 * 2 * 2 * 64 * 4
"""KV of a token of the small model in float32."""
_PIECE = PIECE // _TOKEN_BYTES
_LONGEST = 30_000
"""Tokens of a request that fit the model's context."""
_RESERVES = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(_LONGEST)}
"""SGLang reserves at most this many tokens for an answer, which a worker reclaims memory for."""
_LENT_S = 30.0


def run(setup: Setup, outcome: Outcome) -> None:
    """Compares a master whose prompts exceed its own memory with a server that has it all."""
    local, lent = setup.scale(2048, 512), setup.scale(16384, 2048)
    worked = lent + 1024
    if setup.cuda:
        lent = setup.scale(2, 1) * _PIECE
        worked = lent + _PIECE - PAGE  # SGLang adds a page
    with ExitStack() as stack:
        # The path of a socket is short.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl_ext-"))
        shared = {"directory": directory, "capacity": f"{lent * _TOKEN_BYTES}B"}
        master = {"role": "master", **shared, "deadline": "60s", "lease": "60s"}
        worker = {"role": "worker", **shared, "window": "1s"}

        def system(name: str, tokens: int, *more: str) -> System:
            return System(name, (*arguments(setup, tokens), *more), {**STRICT, **_RESERVES})

        systems = [
            system("peer-large", local + lent),
            system("peer-master", local, *extension({"peer": master})),
            system("peer-worker", worked, *extension({"peer": worker})),
        ]
        servers = stack.enter_context(started(setup, outcome, systems, models.small(setup)))
        if len(servers) < len(systems):
            return
        large, first, second = (servers[each.name] for each in systems)
        with outcome.step("lending"):
            outcome.row(borrowed_tokens=_borrowed(first, lent))
        chance = random.Random(setup.options.seed)  # noqa: S311

        def prompt(tokens: int) -> list[int]:
            return [chance.randrange(97, 123) for _ in range(tokens)]

        with outcome.step("answers"):
            prompts = [prompt(setup.scale((local + lent) // 12, 213)) for _ in range(8)]
            _equal(outcome, large, first, prompts, setup.scale(16, 4))
        with outcome.step("attention"):
            length = setup.scale(local + lent // 2, local + 512)
            _attention(setup, outcome, large, first, prompt(length))
        with outcome.step("reclaiming"):
            needed = min(worked - 512, _LONGEST)
            prompts = [prompt(local + 64) for _ in range(setup.scale(4, 1))]
            for _ in range(setup.scale(3, 1)):
                _reclaim(outcome, (large, first, second), prompts, setup.scale(64, 8), needed)
                _borrowed(first, lent)
        for server in (first, second):
            if held := leak(server):
                outcome.fail(f"{server.system.name} holds after all requests: {held}")


def _borrowed(master: Server, tokens: int) -> int:
    """Waits until the worker lends, and returns the tokens that fit what it has lent."""
    end = time.monotonic() + _LENT_S
    while True:
        found = int(live(master.url)["peer"]["borrowed_bytes"]) // _TOKEN_BYTES
        if found >= tokens - 2 * PAGE:
            return found
        if time.monotonic() > end:
            raise RuntimeError(f"the master has borrowed {found} of {tokens} tokens")
        time.sleep(0.1)


def _reclaim(
    outcome: Outcome, servers: Sequence[Server], prompts: Sequence[Ids], new: int, needed: int
) -> None:
    """Compares answers while the worker has a request that may need ``needed`` tokens."""
    large, master, worker = servers
    stop = {"stop_token_ids": [*range(VOCABULARY)], "ignore_eos": False}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_equal, outcome, large, master, prompts, new)
        ask(worker, prompts[0][:64], needed, **stop)
        running.result()
    found = live(worker.url)["peer"]
    outcome.row(reclaimed_bytes=found["reclaimed"], replaced=found["replaced"])
    if not found["reclaimed"]:
        outcome.fail("the worker reclaimed nothing")


def _equal(
    outcome: Outcome, large: Server, master: Server, prompts: Sequence[Ids], new: int
) -> None:
    expected, found = (ask_all(server, prompts, new) for server in (large, master))
    row: dict[str, Any] = judge(expected, found, TIE)
    outcome.row(system=master.system.name, **row)
    if row["different"]:
        outcome.fail(f"{row['different']} answers in lent memory differ, {row['first']}")


def _attention(
    setup: Setup, outcome: Outcome, large: Server, master: Server, prompt: list[int]
) -> None:
    """Measures decoding over a context that exceeds the master's own memory."""
    tpot: dict[str, list[float]] = {large.system.name: [], master.system.name: []}
    for server in (large, master):
        timed(server, prompt, 2)
    for number in range(setup.scale(9, 1)):
        for server in (large, master)[:: -1 if number % 2 else 1]:
            tpot[server.system.name].append(timed(server, prompt, setup.scale(65, 4))[1])
    found = {name: spread([1e3 * each for each in times]) for name, times in tpot.items()}
    outcome.row(what="TPOT in ms", context=len(prompt), **found)
    ratio = found[master.system.name]["median"] / found[large.system.name]["median"]
    outcome.figure("TPOT over a lent tail to own memory", ratio)
