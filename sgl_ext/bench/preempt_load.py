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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sgl_ext.bench.data import sharegpt_conversations
from sgl_ext.errors import ExtError

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


@dataclass
class Heard:
    """What the client saw of one turn; seconds."""

    began: float
    """From the run's start until it was said."""
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Between tokens."""
    ended: float = 0.0


def talks(
    model: Path, count: int, *, longest: int, rate: float, pause: float, seed: int
) -> list[Talk]:
    """Conversations of at least two turns, which arrive as a Poisson process.

    Args:
        longest: tokens of a conversation, with its answers, at most.
        rate: conversations that begin in a second.
        pause: mean of the exponential pause between an answer and the next turn, seconds.
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
        at += chance.expovariate(rate)
        found.append(Talk(f"{seed}/{len(found)}", at, tuple(turns)))
        if len(found) == count:
            return found
    raise ExtError(
        f"ShareGPT has {len(found)} conversations of up to {longest} tokens, not {count}"
    )


def run(url: str, said: Sequence[Talk], name: str) -> list[Heard]:
    """Has them all.

    Args:
        name: of the run; requests are named after it.

    Raises:
        ExtError: a request was refused or broken off.
    """
    return asyncio.run(_run(url, said, name))


def _said(tokenizer: Any, text: str, *, first: bool) -> list[int]:
    messages = [{"role": "user", "content": text}]
    if first:
        messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
    whole: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not first:  # some templates begin with a system message of their own
        whole = f"{tokenizer.eos_token}\n" + whole[whole.index(f"{tokenizer.bos_token}user") :]
    ids: list[int] = tokenizer.encode(whole, add_special_tokens=False)
    return ids


async def _run(url: str, said: Sequence[Talk], name: str) -> list[Heard]:
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        start = time.perf_counter()
        each = await asyncio.gather(*(_talk(session, url, one, name, start) for one in said))
    return [heard for turns in each for heard in turns]


async def _talk(
    session: aiohttp.ClientSession, url: str, talk: Talk, name: str, start: float
) -> list[Heard]:
    await asyncio.sleep(start + talk.at - time.perf_counter())
    tokens: list[int] = []
    heard = []
    for number, turn in enumerate(talk.turns):
        await asyncio.sleep(turn.pause)
        tokens += turn.said
        body = {
            "rid": f"{name}/{talk.name}/{number}",
            "input_ids": tokens,
            "stream": True,
            "sampling_params": {
                "temperature": 0, "max_new_tokens": turn.answer, "ignore_eos": True,
            },
        }  # fmt: skip
        one = Heard(time.perf_counter() - start)
        tokens += await _answer(session, url, body, one, start)
        heard.append(one)
    return heard


async def _answer(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], heard: Heard, start: float
) -> list[int]:
    ids: list[int] = []
    last = start + heard.began
    async with session.post(f"{url}/generate", json=body) as answer:
        if answer.status != 200:
            raise ExtError(f"{body['rid']}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            found = json.loads(line.removeprefix(b"data: "))
            if "error" in found:
                raise ExtError(f"{body['rid']}: {found['error']}")
            new = len(found["output_ids"]) - len(ids)
            if not ids:
                heard.ttft = now - last
            elif new:
                heard.gaps += [(now - last) / new] * new
            if new:
                ids, last = found["output_ids"], now
    if len(ids) != body["sampling_params"]["max_new_tokens"]:
        raise ExtError(f"{body['rid']} ended after {len(ids)} tokens")
    heard.ended = last - start
    return ids
