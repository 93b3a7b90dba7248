"""TTFT of one mixed trace: all sections together against each power alone, HiCache and stock.

The trace has long chats, whose later turns come when the device has evicted their KV, questions
about documents in other orders, batch jobs that decode for long, and urgent calls that displace
them. All systems have equal device memory; HiCache and tiers have equal host memory and a
directory on a disk, which is slowed down to the speed of computing, as an SSD is in relation to a
GPU. Servers that link chunks get the documents as contexts beforehand, as an
application would create them; the others compute each prompt over documents once, in another order.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from sgl_ext.bench.chunks.linked import DEFAULT, Contexts, Ids, asked
from sgl_ext.bench.chunks.prompts import Prompt, Template, question_prompts
from sgl_ext.bench.data.conversations import conversations
from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together.replay import Timed, replay
from sgl_ext.bench.together.systems import (
    ALL,
    ENVIRONMENT,
    HICACHE,
    INDEPENDENT,
    PLANNING,
    SINGLE,
    STOCK,
    TOKEN_BYTES,
    Memory,
    everything,
    scratch,
)
from sgl_ext.bench.together.trace import KINDS, MIX, REFERENCE, Client, Material, trace
from sgl_ext.config.sets import written
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.progress import Progress
from sgl_ext.serving import server
from sgl_ext.serving.http import generate, live, wait_until_stored
from sgl_ext.serving.server import System

MEMORY = Memory(pool=4096, host=8192)
"""Memory of all systems. Host memory holds twice as much as the device, as HiCache's does by
default."""
_DOCUMENTS = REFERENCE
"""Tokens of each prompt over documents."""
_ORDERS = 3
_CHAT_TOKENS = (1000, 2600)
_START_DEADLINE_S = 900.0
_QUICK_SINGLE = ("tiers", "chunks", "restore", "swap")


Each = TypeVar("Each")


@dataclass(frozen=True)
class MixedSizes:
    """Sizes of the traces.

    Attributes:
        rounds: number of traces; each system runs one after the other, in other orders.
        chats: number of chats of each trace.
        turns: turns of a chat.
        documents: sets of documents of each trace.
        batch: batch jobs of each trace.
        urgent: urgent calls of each trace.
    """

    rounds: int
    chats: int
    turns: int
    documents: int
    batch: int
    urgent: int


QUICK = MixedSizes(2, 3, 3, 2, 2, 4)
WHOLE = MixedSizes(3, 4, 4, 3, 3, 6)


def report_mixed(report: Report, out: Path, *, quick: bool) -> None:
    """Adds the runs and figures of the mixed trace."""
    model, sizes = prepare(SMOLLM2), QUICK if quick else WHOLE
    single = _QUICK_SINGLE if quick else tuple(SINGLE)
    names = [STOCK, HICACHE, *single, ALL, INDEPENDENT]
    template = Template.of_model(model)
    made = materials(model, template, sizes)
    with scratch(out) as places:
        logs = out / "logs" / "mixed"
        unit, memory = measured(model, logs, MEMORY)
        systems = [memory.system(name, places) for name in names]
        with server.serve(systems, model, logs, deadline=_START_DEADLINE_S) as servers:
            found: dict[str, list[Timed]] = {name: [] for name in names}
            progress = Progress("mixed traces", sizes.rounds * len(names))
            for number, material in enumerate(made):
                clients = trace_of(material, number)
                first = number * len(names) // sizes.rounds
                for one in servers[first:] + servers[:first]:
                    contexts = prepared(one, template, material)
                    found[one.system.name] += replay(one.url, clients, unit, contexts)
                    progress.step()
    report.runs.append(
        {
            "what": "trace",
            "model": model.name,
            "page": 16,
            "unit_s": unit,
            "load": MIX.load,
            "device_pool_tokens": memory.pool,
            "host_tokens": memory.host,
            "all": written(everything()),
            "independent": f"{PLANNING}=independent",
            "emulated_ssd_bytes_per_s": memory.rate,
            **asdict(sizes),
        }
    )
    for name, timed in found.items():
        _add_runs(report, name, timed)
    report.figures |= figures({n: [one.ttft for one in t] for n, t in found.items()}, single)


def figures(ttft: Mapping[str, Sequence[float]], single: Sequence[str]) -> dict[str, float]:
    """Returns the ratios of the percentiles of TTFT of all sections to those of other systems.

    Args:
        ttft: TTFT of all requests of each system, in seconds.
        single: names of the systems with one power; the best of these, stock and HiCache is that
            with the lowest percentile.
    """
    found: dict[str, float] = {}
    for rank in (50, 95):
        at = {name: float(np.percentile(each, rank)) for name, each in ttft.items()}
        others = {
            "best_single": min(at[name] for name in (STOCK, HICACHE, *single)),
            "all_independent": at[INDEPENDENT],
            STOCK: at[STOCK],
            HICACHE: at[HICACHE],
        }
        for name, other in others.items():
            found[f"mixed_trace_ttft_p{rank}_ratio_vs_{name}"] = at[ALL] / other
    return found


def materials(model: Path, template: Template, sizes: MixedSizes) -> list[Material[Prompt]]:
    """Returns the material of each trace; no two have a prompt in common.

    Raises:
        ExtError: the data sets have too few texts.
    """
    chats = conversations(model, sizes.rounds * sizes.chats, turns=sizes.turns, tokens=_CHAT_TOKENS)
    said = [
        [chat.prompts[0], *(
            after[len(before) :]
            for before, after in zip(chat.heard, chat.prompts[1:], strict=False)
        )]
        for chat in chats
    ]  # fmt: skip
    sets = question_prompts(
        template, asked("hotpotqa"), sizes.rounds * sizes.documents, length=_DOCUMENTS
    )
    orders = [
        [template.reordered(prompt, seed=order + 1) for order in range(_ORDERS)] for prompt in sets
    ]
    jobs = _encoded(template, sizes.rounds * sizes.batch, (2400, 4000), 600)
    calls = _encoded(template, sizes.rounds * sizes.urgent, (4001, 7000), 1000)

    return [
        Material(
            _part(said, sizes.chats, number),
            _part(orders, sizes.documents, number),
            _part(jobs, sizes.batch, number),
            _part(calls, sizes.urgent, number),
        )
        for number in range(sizes.rounds)
    ]


def _part(each: Sequence[Each], size: int, number: int) -> Sequence[Each]:
    return each[number * size : (number + 1) * size]


def measured(
    model: Path, logs: Path, memory: Memory, tokens: int = REFERENCE
) -> tuple[float, Memory]:
    """Measures how long stock SGLang computes a prompt of ``tokens`` tokens.

    Returns:
        This time in seconds, the unit of a trace; and the memory of all systems, with an SSD that
        loads the KV of the prompt in that time.
    """
    with server.serve([System("unit", memory.arguments, ENVIRONMENT)], model, logs) as (stock,):
        unit = _unit_of(stock.url, tokens)
    return unit, replace(memory, rate=round(tokens * TOKEN_BYTES / unit))


def _unit_of(url: str, tokens: int) -> float:
    chance = random.Random(0)  # noqa: S311
    seconds = []
    for _ in range(4):
        prompt = [chance.randrange(1000, 40_000) for _ in range(tokens)]
        seconds.append(_seconds(url, prompt))
    return statistics.median(seconds[1:])  # the first requests of a process are slow


def _seconds(url: str, prompt: Sequence[int]) -> float:
    from sgl_ext.bench.harness.load_generator import Request, run

    (timing,) = run(url, [Request(prompt, 1)])
    return timing.ttft


def prepared(
    one: server.Server, template: Template, material: Material[Prompt]
) -> Mapping[str, Ids] | None:
    """Gives a server the documents of a trace beforehand, and waits until tiers have stored them.

    Returns:
        The ids of the contexts by the name of the prompt; None if the server does not link chunks.
    """
    state = live(one.url)
    contexts = None
    if "chunks" in one.system.name or one.system.name in (ALL, INDEPENDENT):
        creator = Contexts(one.url, template)
        prompts = [orders[0] for orders in material.documents]
        contexts = {prompt.name: creator.create(prompt, DEFAULT) for prompt in prompts}
    else:
        for orders in material.documents:
            other = template.reordered(orders[0], seed=0)
            generate(one.url, [*other.tokens], 1)
    if "tiers" in state:
        wait_until_stored(one.url)
    return contexts


def trace_of(material: Material[Prompt], seed: int) -> Sequence[Client[Prompt]]:
    return trace(material, [len(orders[0].tokens) for orders in material.documents], seed)


def _encoded(
    template: Template, count: int, characters: tuple[int, int], most: int
) -> list[list[int]]:
    texts = sharegpt_prompts(count, characters=characters)
    return [template.encode(text)[:most] for text in texts]


def _add_runs(report: Report, name: str, timed: Sequence[Timed]) -> None:
    groups: dict[str, Sequence[Timed]] = {"all": timed}
    groups |= {kind: [one for one in timed if one.kind == kind] for kind in KINDS}
    groups["later turns of chats"] = [one for one in groups["chat"] if one.turn]
    for kind, those in groups.items():
        ttft = [one.ttft for one in those]
        asked = sum(one.prompt for one in those)
        report.runs.append(
            {
                "what": f"mixed, {kind}",
                "system": name,
                "samples": len(those),
                "ttft_ms_p50": 1e3 * float(np.percentile(ttft, 50)),
                "ttft_ms_p95": 1e3 * float(np.percentile(ttft, 95)),
                "prefix_hit_rate": sum(one.cached for one in those) / asked,
            }
        )
