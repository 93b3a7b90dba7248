"""Answers of the small model under every power and option, against those of stock SGLang.

All systems answer in float32. At a token where stock's two best tokens are as good as equal another
batch may choose the other one; such ties are counted, and the rest of the answer is not compared.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.check import models
from gpu.check.outcome import Outcome
from gpu.check.servers import (
    EAGER,
    NO_OVERLAP,
    STRICT,
    Ids,
    arguments,
    ask,
    ask_all,
    extension,
    leak,
    started,
    state,
)
from gpu.check.setup import Setup

from sgl_ext.serving.server import Server, System

REFERENCE = "stock"
TIE = 1e-3
"""Largest difference of two float32 logprobs that count as equal."""
_CHUNK = 512
_HOST = {"capacity": "256MiB"}
_RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
_LOOSE = {"chunks": {"method": "lego-8", "largest_divergence": 1000.0}}
"""A random model is not fit for linked chunks."""


def run(setup: Setup, outcome: Outcome) -> None:
    """Compares all systems on the small model."""
    compare(setup, outcome, models.small(setup), systems(setup))


def systems(setup: Setup) -> list[System]:
    """Returns stock SGLang with a large pool, and all systems that are compared with it."""
    sizes = setup.scale(2048, 768)

    def system(name: str, config: Mapping[str, Any] | None, *more: str, **env: str) -> System:
        ours = () if config is None else extension(config)
        prefill = ("--chunked-prefill-size", str(_CHUNK))
        return System(name, (*arguments(setup, sizes), *prefill, *ours, *more), {**STRICT, **env})

    tiers, slab = {"tiers": {"host": _HOST}}, {"memory": {"layout": "block_major"}}
    return [
        System(REFERENCE, (*arguments(setup, 16384), *EAGER, *NO_OVERLAP)),
        system("stock-graphs", None),
        system("slab", slab),
        system("slab-eager", slab, *EAGER),
        system("slab-no-overlap", slab, *NO_OVERLAP),
        system("layer-major", {"memory": {"layout": "layer_major"}}),
        system("tiers", tiers),
        system("tiers-eager", tiers, *EAGER, *NO_OVERLAP),
        system("restore-tokens", {**tiers, "restore": {"host": "tokens", "chunk": 64}}),
        system("restore-layers", {**tiers, "restore": {"host": "layers", "chunk": 64}}),
        system("swap", {**tiers, "swap": {"capacity": "64MiB"}}, **_RETRACT),
        # The probe at the start has prompts of a thousand bytes.
        system("chunks", _LOOSE, "--max-total-tokens", "8192"),
    ]


def compare(
    setup: Setup, outcome: Outcome, model: Path, compared: Sequence[System], tie: float = TIE
) -> None:
    """Starts systems, sends all of them the same prompts, and compares their answers."""
    if only := setup.options.systems:
        compared = [each for each in compared if each.name in (REFERENCE, *only)]
    with started(setup, outcome, compared, model) as servers:
        stock = servers.pop(REFERENCE, None)
        if stock is None:
            outcome.fail("nothing to compare with: stock SGLang does not serve")
            return
        load = Load(setup, stock)

        def check(server: Server) -> None:
            name = server.system.name
            with outcome.step(name):
                found = load.play(server)
                power = name.partition("-")[0]
                if power == "chunks":
                    found.append(load.linked(server))
                row = judge(load.expected, found, tie)
                told = acted(server, power, found)
                held = leak(server)
                outcome.row(system=name, **row, acted=told, leak=held)
                if row["different"]:
                    outcome.fail(f"{name}: {row['different']} answers differ, {row['first']}")
                if reason := without_slab(server, power):
                    outcome.refuse(name, reason)
                elif told is not None and not told:
                    outcome.fail(f"{name}: the power did not act")
                if held:
                    outcome.fail(f"{name} holds after all requests: {held}")

        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            list(pool.map(check, servers.values()))
        if held := leak(stock):
            outcome.fail(f"{REFERENCE} holds after all requests: {held}")


class Load:
    """Prompts that exceed a small pool, and stock SGLang's answers to them.

    The second round continues the prompts of the first; the third sends the first again. What a
    round reuses was evicted before.
    """

    def __init__(self, setup: Setup, stock: Server) -> None:
        chance = random.Random(setup.options.seed)  # noqa: S311
        count, length = setup.scale(10, 4), setup.scale(400, 220)
        self._new = setup.scale(16, 6)

        def ids(least: int, most: int) -> list[int]:
            return [chance.randrange(97, 123) for _ in range(chance.randint(least, most))]

        first = [ids(length // 2, length) for _ in range(count)]
        second = [prompt + ids(20, 60) for prompt in first]
        self._rounds = [first, second, first]
        self._parts = "Read this. ", "".join(map(chr, ids(200, 300))), "Well?"
        self.expected = [answer for prompts in self._rounds for answer in self._ask(stock, prompts)]
        self.expected.append(ask(stock, "".join(self._parts), self._new))

    def _ask(self, server: Server, prompts: Sequence[Ids]) -> list[dict[str, Any]]:
        return ask_all(server, prompts, self._new)

    def play(self, server: Server) -> list[dict[str, Any]]:
        """Returns a server's answers to all rounds."""
        return [answer for prompts in self._rounds for answer in self._ask(server, prompts)]

    def linked(self, server: Server) -> dict[str, Any]:
        """Links a chunk in two ways; returns the answer of the one that recomputes all of it."""
        from sgl_ext.client import ContextCache
        from sgl_ext.marks import mark

        lead, chunk, question = self._parts
        cache = ContextCache(server.url, timeout=60)
        answers = []
        for method in ("lego-8", "full"):
            (context,) = cache.create([chunk], method=method)
            answers.append(ask(server, lead + mark(context.id) + question, self._new))
        approximate, exact = answers
        exact["meta_info"]["ext"] = [*_told(approximate, "chunks"), *_told(exact, "chunks")]
        return exact


def judge(
    expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], tie: float
) -> dict[str, Any]:
    """Counts answers that are equal, end in a tie, or differ, with the first difference."""
    counts: dict[str, Any] = {"equal": 0, "ties": 0, "different": 0, "first": ""}
    for number, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        ids, our_ids = theirs["output_ids"], ours["output_ids"]
        if ids == our_ids:
            counts["equal"] += 1
            continue
        pairs = enumerate(zip(ids, our_ids, strict=False))
        at = next((number for number, (one, other) in pairs if one != other), -1)
        best = theirs["meta_info"]["output_top_logprobs"][at]
        gap = best[0][0] - best[1][0]
        if at >= 0 and gap < tie:
            counts["ties"] += 1
            continue
        counts["different"] += 1
        counts["first"] = counts["first"] or (
            f"the first one at token {at} of answer {number}: {our_ids[at]}, not {ids[at]}, which "
            f"is better by {gap:.2g}"
        )
    return counts


def acted(server: Server, power: str, answers: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns how much a power did, in its own unit; None for systems without one."""
    metas = [answer["meta_info"] for answer in answers]
    if power == "tiers":
        return sum(int((meta.get("cached_tokens_details") or {}).get("host", 0)) for meta in metas)
    if power == "swap":
        return int(state(server)["internal_states"][0]["sgl_ext"]["swap"]["swapped_in"])
    if power == "chunks":
        return sum(int(entry.get("linked", 0)) for each in answers for entry in _told(each, power))
    if power == "restore":
        return sum(bool(_told(answer, power)) for answer in answers)
    return None


def without_slab(server: Server, power: str) -> str:
    """Returns why a server that should have the slab has SGLang's own pool; empty if it has."""
    memory = state(server)["sgl_ext"]["memory"] if power == "slab" else {}
    return str(memory.get("because", ""))


def _told(answer: Mapping[str, Any], power: str) -> list[dict[str, Any]]:
    return [each for each in answer["meta_info"].get("ext") or [] if each["power"] == power]
