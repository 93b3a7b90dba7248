"""Conversations of several turns: each is said when the one before has been answered, and a pause.

What is said is ShareGPT's, and so is the length of each answer; what is answered is the model's, so
that a turn begins with what the server has in its cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from sgl_ext.bench.data.texts import sharegpt_conversations
from sgl_ext.errors import ExtError

_SAME = 0.25
_AWAY = 4
"""Iterations of others after which a turn had given way."""
_DEADLINE_S = 1800.0
"""Of an answer: under overload many wait for long."""


@dataclass(frozen=True)
class Turn:
    said: tuple[int, ...]
    """Token ids, with what the chat template puts around them."""
    answer: int
    """Tokens."""
    pause: float = 0.0
    """Seconds before it is said."""


@dataclass(frozen=True)
class Talk:
    """A conversation that begins ``at`` seconds after the run's start."""

    name: str
    at: float
    turns: tuple[Turn, ...]
    priority: int | None = None
    """None: the server's policy decides."""


@dataclass
class Heard:
    """What the client saw of one turn; seconds are of the run."""

    name: str
    began: float
    """When it was said."""
    prompt: int
    """Tokens, with all that was said before."""
    times: list[float] = field(default_factory=list)
    """When each token came."""
    tokens: list[int] = field(default_factory=list)
    """Ids."""
    cached: int = 0
    """Tokens of the prompt that were not computed."""

    @property
    def ttft(self) -> float:
        """Seconds from its being said to the first token."""
        return self.times[0] - self.began


def gaps_in_service(heard: Sequence[Heard]) -> list[float]:
    """Seconds between the tokens of a turn, but for those in which it had given way to others.

    Whoever is served gets a token whenever others do, or nearly: a prompt that is computed gives
    one to its own request. Tokens that come within a fraction of an iteration are of the same one.
    """
    times = np.sort(np.concatenate([one.times for one in heard]))
    apart = np.diff(times)
    typical = np.median(np.concatenate([np.diff(one.times) for one in heard]))
    iterations = times[1:][apart > _SAME * typical]
    found: list[float] = []
    for one in heard:
        numbers = np.searchsorted(iterations, one.times, "right")
        served = np.diff(numbers) <= _AWAY
        found += np.diff(one.times)[served].tolist()
    return found


@cache
def talks(
    model: Path,
    count: int,
    *,
    longest: int,
    pause: float,
    seed: int,
    levels: tuple[int | None, ...] = (None,),
) -> tuple[Talk, ...]:
    """Conversations of at least two turns, which arrive as a Poisson process of one in a second.

    Args:
        longest: tokens of a conversation, with its answers, at most.
        pause: mean of the exponential pause between an answer and the next turn, seconds.
        levels: priorities, of which each conversation draws one.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chance = random.Random(seed)  # noqa: S311
    found: list[Talk] = []
    at = 0.0
    conversations = [each for each in sharegpt_conversations() if len(each) >= 4]
    chance.shuffle(conversations)
    for texts in conversations:
        turns: list[Turn] = []
        tokens = 0
        for number, (user, assistant) in enumerate(zip(texts[::2], texts[1::2], strict=False)):
            said = tuple(_said(tokenizer, user, first=number == 0))
            answer = max(len(tokenizer.encode(assistant, add_special_tokens=False)), 1)
            if (tokens := tokens + len(said) + answer) > longest:
                break
            turns.append(Turn(said, answer, chance.expovariate(1 / pause) if number else 0.0))
        if len(turns) < 2:
            continue
        at += chance.expovariate(1)
        level = chance.choice(levels)
        found.append(Talk(f"{seed}/{len(found)}", at, tuple(turns), level))
        if len(found) == count:
            return tuple(found)
    raise ExtError(
        f"ShareGPT has {len(found)} conversations of up to {longest} tokens, not {count}"
    )


def at_rate(said: Sequence[Talk], rate: float) -> list[Talk]:
    """Conversations as of :func:`talks`, of which ``rate`` begin in a second."""
    return [replace(one, at=one.at / rate) for one in said]


def run(url: str, said: Sequence[Talk]) -> list[Heard]:
    """Has them all. Requests are named after their conversations, whatever server has them.

    Raises:
        ExtError: a request was refused or broken off.
    """
    try:
        return asyncio.run(_run(url, said))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ExtError(f"{url} broke off: {error!r}") from error


def _said(tokenizer: Any, text: str, *, first: bool) -> list[int]:
    messages = [{"role": "user", "content": text}]
    if first:
        messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
    whole: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not first:  # some templates begin with a system message of their own
        whole = f"{tokenizer.eos_token}\n" + whole[whole.index(f"{tokenizer.bos_token}user") :]
    ids: list[int] = tokenizer.encode(whole, add_special_tokens=False)
    return ids


async def _run(url: str, said: Sequence[Talk]) -> list[Heard]:
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
    # A connection that waits for the next turn may be closed while that is being sent.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        start = time.perf_counter()
        each = await asyncio.gather(*(_talk(session, url, one, start) for one in said))
    return [heard for turns in each for heard in turns]


async def _talk(session: aiohttp.ClientSession, url: str, talk: Talk, start: float) -> list[Heard]:
    await asyncio.sleep(start + talk.at - time.perf_counter())
    tokens: list[int] = []
    heard = []
    for number, turn in enumerate(talk.turns):
        await asyncio.sleep(turn.pause)
        tokens += turn.said
        body = {
            "rid": f"{talk.name}/{number}",
            "input_ids": tokens,
            "stream": True,
            "priority": talk.priority,
            "sampling_params": {
                "temperature": 0, "max_new_tokens": turn.answer, "ignore_eos": True,
            },
        }  # fmt: skip
        one = Heard(f"{talk.name}/{number}", time.perf_counter() - start, len(tokens))
        await _answer(session, url, body, one, start)
        tokens += one.tokens
        heard.append(one)
    return heard


async def _answer(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], heard: Heard, start: float
) -> None:
    async with session.post(f"{url}/generate", json=body) as answer:
        if answer.status != 200:
            raise ExtError(f"{body['rid']}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - start
            found = json.loads(line.removeprefix(b"data: "))
            if "error" in found:
                raise ExtError(f"{body['rid']}: {found['error']}")
            heard.times += [now] * (len(found["output_ids"]) - len(heard.tokens))
            heard.tokens = found["output_ids"]
            heard.cached = found["meta_info"]["cached_tokens"]
    if len(heard.tokens) != body["sampling_params"]["max_new_tokens"]:
        raise ExtError(f"{body['rid']} ended after {len(heard.tokens)} tokens")
