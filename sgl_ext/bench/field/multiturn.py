"""Many clients with several rounds each, as in HiCache's ``bench_multiturn``.

The text of a round follows the client's earlier rounds and the server's answers to them. Requests
arrive as a Poisson process, at a rate that keeps stock SGLang busy if it finds nothing in its
cache.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.bench.field.rounds import Drawn, Rounds
from sgl_ext.bench.field.systems import ratios
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved
from sgl_ext.bench.together.systems import STOCK
from sgl_ext.errors import ExtError
from sgl_ext.serving.server import Server

if TYPE_CHECKING:
    from sgl_ext.bench.harness.load_generator import Timing

_LOAD = 1.0
"""Arrival rate, relative to the rate at which stock SGLang computes the prompts."""
_CHARACTERS = (2000, 20_000)
"""Length of the messages that texts of a round are cut from, in characters."""


@dataclass(frozen=True)
class MultiturnSizes:
    """Sizes of the load.

    Attributes:
        clients: number of clients.
        rounds: rounds of each client.
        length: tokens of the text of a round.
        answer: tokens of an answer.
        parallel: most requests that are sent at the same time.
        runs: number of runs on each server; each has other texts.
    """

    clients: int
    rounds: int
    length: int
    answer: int
    parallel: int
    runs: int

    @property
    def mean_prompt(self) -> int:
        """Mean tokens of a prompt, with the earlier rounds."""
        return round((self.rounds + 1) / 2 * self.length + (self.rounds - 1) / 2 * self.answer)


@dataclass(frozen=True)
class _Timed:
    round: int
    answer: Timing


@dataclass(frozen=True)
class _Run:
    requests: Sequence[_Timed]
    seconds: float


def report_multiturn(
    report: Report, servers: Sequence[Server], model: Path, sizes: MultiturnSizes
) -> None:
    """Adds TTFT and cached share of the first and of the later rounds, and the throughput.

    Raises:
        ExtError: the data set has too few messages, or a request failed.
    """
    texts = texts_of(model, sizes.runs * sizes.clients * sizes.rounds, sizes.length)
    (stock,) = (each for each in servers if each.system.name == STOCK)
    rate = _LOAD / _seconds_of(stock.url, sizes.mean_prompt)

    def run(server: Server, number: int) -> _Run:
        of_run = sizes.clients * sizes.rounds
        said = texts[number * of_run : (number + 1) * of_run]
        begin = time.perf_counter()
        requests = asyncio.run(replay(server.url, said, sizes, rate, number))
        return _Run(requests, time.perf_counter() - begin)

    found = interleaved([partial(run, each) for each in servers], sizes.runs, "rounds of clients")
    medians: dict[str, float] = {}
    for server, runs in zip(servers, found, strict=True):
        name = server.system.name
        timed = [one for each in runs for one in each.requests]
        first = [one.answer for one in timed if not one.round]
        later = [one.answer for one in timed if one.round]
        medians[name] = statistics.median(one.ttft for one in later)
        per_s = statistics.median(len(each.requests) / each.seconds for each in runs)
        for kind, answers in (("first", first), ("later", later)):
            report.runs.append(
                {"what": f"multiturn, {kind} rounds", "system": name, "runs": sizes.runs}
                | {"samples": len(answers), "arrivals_per_s": rate}
                | summary([one.ttft for one in answers], "ttft_ms", 1e3)
                | {
                    "cached_share": sum(one.cached_tokens for one in answers)
                    / sum(one.prompt_tokens for one in answers),
                    "answers_per_s": per_s,
                }
            )
    report.figures |= ratios("multiturn_later_ttft_p50", medians)


def texts_of(model: Path, count: int, tokens: int) -> list[str]:
    """Returns different texts of ``tokens`` tokens each, from messages of ShareGPT.

    Raises:
        ExtError: the data set has too few long messages.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found: list[str] = []
    for message in sharegpt_prompts(4 * count, characters=_CHARACTERS):
        ids = tokenizer.encode(message, add_special_tokens=False)
        if len(ids) >= tokens:
            found.append(tokenizer.decode(ids[:tokens]))
        if len(found) == count:
            return found
    raise ExtError(f"ShareGPT has {len(found)} first messages of {tokens} tokens, not {count}")


async def replay(
    url: str, texts: Sequence[str], sizes: MultiturnSizes, rate: float, seed: int
) -> list[_Timed]:
    """Sends all rounds of all clients to a server, and returns the answers as they were sent.

    Args:
        texts: text of each round of each client, one client after another.
        rate: mean requests per second.
        seed: seed of the order of clients and of the times of arrival.

    Raises:
        RequestError: a request failed.
    """
    from sgl_ext.bench.harness.load_generator import Request, send, set_options

    chance = random.Random(f"arrivals/{seed}")  # noqa: S311
    rounds = Rounds(sizes.clients, sizes.rounds, sizes.parallel, seed)
    said = [""] * sizes.clients
    set_options()

    async def ask(drawn: Drawn) -> _Timed:
        client = drawn.client
        said[client] += texts[client * sizes.rounds + drawn.round]
        heard = await send(url, Request(said[client], sizes.answer))
        said[client] += f"{heard.text}\n\n"
        rounds.answered(client)
        return _Timed(drawn.round, heard)

    tasks: list[asyncio.Task[_Timed]] = []
    running: set[asyncio.Task[_Timed]] = set()
    while rounds.left:
        if (drawn := rounds.draw()) is None:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises what the request raised
            continue
        tasks.append(asyncio.create_task(ask(drawn)))
        running.add(tasks[-1])
        await asyncio.sleep(chance.expovariate(rate))
    return await asyncio.gather(*tasks)


def _seconds_of(url: str, tokens: int) -> float:
    """Returns the median seconds in which a server computes a prompt of ``tokens`` tokens."""
    from sgl_ext.bench.harness.load_generator import Request, run

    chance = random.Random("multiturn")  # noqa: S311
    prompts = ([chance.randrange(1000, 40_000) for _ in range(tokens)] for _ in range(3))
    return statistics.median(run(url, [Request(prompt, 1)])[0].ttft for prompt in prompts)
