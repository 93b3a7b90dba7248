"""Replay of a trace against one server, as its clients observe it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sgl_ext.bench.chunks.linked import Ids, text_of
from sgl_ext.bench.chunks.prompts import Prompt
from sgl_ext.bench.harness.session import session
from sgl_ext.bench.swap.load import Heard, answer
from sgl_ext.bench.together.trace import Client, Kind, Step
from sgl_ext.errors import ExtError

_DEADLINE_S = 1200.0


@dataclass(frozen=True)
class Timed:
    """Request of a trace.

    Attributes:
        turn: number of the request among those of its client.
        ttft: time to first token, in seconds.
    """

    kind: Kind
    turn: int
    ttft: float
    prompt: int
    """Tokens of the prompt."""
    cached: int
    """Tokens of the prompt that were not computed."""


def replay(
    url: str,
    clients: Sequence[Client[Prompt]],
    unit: float,
    contexts: Mapping[str, Ids] | None = None,
) -> list[Timed]:
    """Sends all requests of a trace to a server, and returns their times.

    Args:
        unit: seconds of a unit of the trace.
        contexts: ids of contexts by the name of the prompt, for a server that links chunks; None
            to send prompts over documents as token ids.

    Raises:
        ExtError: a request was refused, was interrupted or missed its deadline.
    """
    try:
        return asyncio.run(_replay(url, clients, unit, contexts))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ExtError(f"{url} interrupted an answer: {error!r}; read the server's log") from error


async def _replay(
    url: str,
    clients: Sequence[Client[Prompt]],
    unit: float,
    contexts: Mapping[str, Ids] | None,
) -> list[Timed]:
    async with session(_DEADLINE_S) as http:
        start = time.perf_counter()

        async def run(client: Client[Prompt]) -> list[Timed]:
            await asyncio.sleep(start + client.at * unit - time.perf_counter())
            tokens: list[int] = []
            found = []
            for turn, step in enumerate(client.steps):
                await asyncio.sleep(step.pause * unit)
                tokens += step.said
                body = _body(client, turn, step, tokens, contexts)
                heard = Heard(body["rid"], time.perf_counter() - start, len(tokens))
                await answer(http, url, body, heard, start)
                tokens += heard.tokens
                length = len(step.prompt.tokens) if step.prompt else heard.prompt
                found.append(Timed(client.kind, turn, heard.ttft, length, heard.cached))
            return found

        each = await asyncio.gather(*map(run, clients))
    return [timed for those in each for timed in those]


def _body(
    client: Client[Prompt],
    turn: int,
    step: Step[Prompt],
    tokens: Sequence[int],
    contexts: Mapping[str, Ids] | None,
) -> dict[str, Any]:
    if step.prompt is None:
        prompt: dict[str, Any] = {"input_ids": [*tokens]}
    elif contexts is None:
        prompt = {"input_ids": [*step.prompt.tokens]}
    else:
        prompt = {"text": text_of(step.prompt, contexts[step.prompt.name])}
    sampling = {"temperature": 0, "max_new_tokens": step.answer, "ignore_eos": True}
    return {
        **prompt,
        "rid": f"{client.name}/{turn}",
        "stream": True,
        "priority": client.priority,
        "sampling_params": sampling,
    }
