"""Resumption of preempted requests whose KV had to leave host memory for an SSD.

Requests that decode are displaced by urgent prompts that need nearly the whole device. Host memory
has room for the KV of the displaced requests only until that of those prompts arrives, and the swap
budget for a part of it, so that their KV can only be kept on the SSD. When the last urgent answer
ends, the displaced requests can resume. The system compared with recomputes them: it chooses the
same requests, and keeps no KV of them.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, ratio_of_medians
from sgl_ext.bench.harness.session import session
from sgl_ext.bench.swap import systems as swapping
from sgl_ext.bench.swap.load import Heard, answer
from sgl_ext.bench.together.systems import ENVIRONMENT, PAGE, extended
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving import server
from sgl_ext.serving.http import live
from sgl_ext.serving.server import BESIDE_OTHERS

OURS, RECOMPUTE = "swap to ssd", swapping.RECOMPUTE
_POOL = 4096
_HOST, _BUDGET = "96MiB", "24MiB"
"""Host memory for KV, about 2,900 tokens of the model in bfloat16, and how much of it swapped
requests may keep."""
_VICTIMS, _URGENT = 2, 2
_VICTIM, _ANSWER, _BEGUN = 1200, 320, 8
"""Tokens of the prompt and of the answer of a displaced request; tokens before it is displaced."""
_PROMPT = 3600
"""Tokens of an urgent prompt."""
_DEADLINE_S = 600.0


class Resumed(NamedTuple):
    """Displaced request.

    Attributes:
        next: seconds from the end of the urgent requests to its next token.
        rest: seconds from the end of the urgent requests to its last token.
    """

    next: float
    rest: float


def report_swap_to_ssd(report: Report, out: Path, *, quick: bool) -> None:
    """Adds the times of resumption of both systems and their ratio."""
    model, rounds = prepare(SMOLLM2), 3 if quick else 20
    with TemporaryDirectory(dir=out, prefix="swapped-") as scratch:
        base = ("--max-total-tokens", str(_POOL), "--page-size", str(PAGE), *BESIDE_OTHERS)
        ssd = {"directories": [scratch], "capacity": "4GiB", "keep_after": 1}
        tiers = {"host": {"capacity": _HOST}, "ssd": ssd}
        policy = {"policy": "static"}
        config = {"tiers": tiers, "swap": {"capacity": _BUDGET, **policy}}
        (other,) = swapping.systems([RECOMPUTE], _POOL, _HOST, policy, None)
        passive = replace(other, environment={**ENVIRONMENT, **other.environment})
        systems = [extended(OURS, base, config), passive]
        with server.serve(systems, model, out / "logs" / "swapped") as servers:
            samplers = [
                lambda number, url=one.url: asyncio.run(_round(url, number)) for one in servers
            ]
            found = interleaved(samplers, rounds + 1, "displaced requests")
            states = [live(one.url) for one in servers]
    nexts: dict[str, list[float]] = {}
    for system, samples, state in zip(systems, found, states, strict=True):
        resumed = [each for each_round in samples[1:] for each in each_round]
        nexts[system.name] = [each.next for each in resumed]
        report.runs.append(
            {"what": "swap_to_ssd", "system": system.name, "samples": len(resumed)}
            | summary(nexts[system.name], "next_token_ms", 1e3)
            | {"rest_ms_p50": 1e3 * statistics.median(each.rest for each in resumed)}
            | {name: state["swap"][name] for name in ("swapped_out", "swapped_in", "recomputed")}
            | {"ssd_hit_tokens": state["tiers"].get("ssd", {}).get("hit_tokens", 0)}
        )
    report.figures["swap_to_ssd_ttft_ratio_vs_recompute"] = ratio_of_medians(
        nexts[OURS], nexts[RECOMPUTE]
    )


async def _round(url: str, number: int) -> Sequence[Resumed]:
    """Displaces requests with new prompts, and returns when they went on.

    Raises:
        ExtError: a request was refused, or a displaced request ended before the urgent ones.
    """
    chance = random.Random(f"swapped/{number}")  # noqa: S311

    def prompt(tokens: int) -> list[int]:
        return [chance.randrange(1000, 40_000) for _ in range(tokens)]

    async with session(_DEADLINE_S) as http:
        start = time.perf_counter()

        def send(name: str, tokens: list[int], new: int, priority: int) -> tuple[Heard, Any]:
            heard = Heard(f"{number}/{name}", time.perf_counter() - start, len(tokens))
            body = {
                "rid": heard.name,
                "input_ids": tokens,
                "stream": True,
                "priority": priority,
                "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            }
            return heard, asyncio.create_task(answer(http, url, body, heard, start))

        displaced = [send(f"low/{at}", prompt(_VICTIM), _ANSWER, 0) for at in range(_VICTIMS)]
        while any(len(heard.times) < _BEGUN and not task.done() for heard, task in displaced):
            await asyncio.sleep(0.005)
        urgent = [send(f"high/{at}", prompt(_PROMPT), 4, 1000) for at in range(_URGENT)]
        await asyncio.gather(*(task for _, task in (*urgent, *displaced)))
        ended = max(heard.times[-1] for heard, _ in urgent)
        found = []
        for heard, _ in displaced:
            after = [at for at in heard.times if at > ended]
            if not after:
                raise ExtError(f"{url}: {heard.name} ended before the requests that displace it")
            found.append(Resumed(after[0] - ended, after[-1] - ended))
        return found
