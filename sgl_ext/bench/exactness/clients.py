"""HTTP requests of an exactness run, and the answers of stock SGLang to the same prompts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from sgl_ext.bench.exactness.answers import Answer, Ending, Found
from sgl_ext.bench.exactness.script import Leave
from sgl_ext.errors import ExtError

_STOCK_DEADLINE_S = 600.0


def greedy(prompt: Mapping[str, Any], tokens: int, **more: Any) -> dict[str, Any]:
    """Returns the body of a greedy ``/generate`` request for ``tokens`` new tokens.

    Args:
        prompt: ``input_ids`` or ``text``, and optionally ``custom_params``.
        more: further sampling parameters.
    """
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more}
    if (custom := prompt.get("custom_params")) is not None:
        sampling["custom_params"] = custom
    rest = {name: value for name, value in prompt.items() if name != "custom_params"}
    return {**rest, "sampling_params": sampling}


class Stock:
    """Answers of stock SGLang; each distinct prompt is requested once."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._asked: dict[tuple[tuple[int, ...], int], asyncio.Task[Answer]] = {}

    async def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Returns the answer of stock SGLang to a prompt.

        Raises:
            ExtError: stock SGLang does not answer.
        """
        key = (tuple(prompt), tokens)
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._ask(*key))
        return await asyncio.shield(self._asked[key])

    async def _ask(self, prompt: tuple[int, ...], tokens: int) -> Answer:
        body = greedy({"input_ids": prompt}, tokens)
        body |= {"return_logprob": True, "top_logprobs_num": 2}
        try:
            async with (
                asyncio.timeout(_STOCK_DEADLINE_S),
                self._session.post(f"{self._url}/generate", json=body) as answer,
            ):
                text = await answer.text()
                if answer.status != 200:
                    raise ExtError(f"stock SGLang answered {answer.status}: {text[:300]}")
        except (aiohttp.ClientError, OSError) as error:
            raise ExtError(f"stock SGLang did not answer: {error!r}") from error
        found = json.loads(text)
        top = found["meta_info"]["output_top_logprobs"]
        gaps = [best[0] - second[0] for best, second in top]
        return Answer(found["output_ids"], _logprobs(found), gaps)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    leave: Leave | None,
    deadline: float,
) -> Found:
    """Sends a request to a server that may end meanwhile; returns within ``deadline`` seconds.

    Args:
        leave: when and how the client gives the request up; None: never.
    """
    found = Found()
    began = time.monotonic()
    try:
        async with asyncio.timeout(deadline):
            await (_stream if body.get("stream") else _whole)(session, url, body, leave, found)
    except TimeoutError:
        found.ending = Ending.HUNG
    except (aiohttp.ClientError, OSError) as error:
        found.ending, found.said = Ending.CUT, repr(error)
    found.seconds = time.monotonic() - began
    return found


async def _whole(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    leave: Leave | None,
    found: Found,
) -> None:
    async def post() -> tuple[int, str]:
        async with session.post(f"{url}/generate", json=body) as answer:
            return answer.status, await answer.text()

    asked = asyncio.create_task(post())
    try:
        if leave is not None:
            await asyncio.wait([asked], timeout=leave.seconds)
            if not asked.done() and leave.by == "disconnect":
                found.ending = Ending.LEFT
                return
            if not asked.done():
                await _abort(session, url, [body["rid"]])
                found.ending = Ending.ABORTED
        status, text = await asked
    finally:
        if not asked.done():
            asked.cancel()
            with suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
                await asked
    if status != 200:
        _refused(found, f"{status} {text}")
        return
    answers = json.loads(text)
    for number, each in enumerate(answers if isinstance(answers, list) else [answers]):
        _take(found, number, each)


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    leave: Leave | None,
    found: Found,
) -> None:
    count = body["sampling_params"]["max_new_tokens"]
    async with session.post(f"{url}/generate", json=body) as answer:
        if answer.status != 200:
            _refused(found, f"{answer.status} {await answer.text()}")
            return
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            each = json.loads(line.removeprefix(b"data: "))
            if "error" in each:
                _refused(found, str(each["error"]))
                continue
            _take(found, each.get("index", 0), each)
            come = max(len(one.tokens) for one in found.answers.values())
            if leave is None or come < max(leave.share * count, 1):
                continue
            if leave.by == "disconnect":
                found.ending = Ending.LEFT
                answer.close()
                return
            if found.ending is Ending.DONE:
                await _abort(session, url, list(found.ids.values()))
                found.ending = Ending.ABORTED


async def _abort(session: aiohttp.ClientSession, url: str, ids: Sequence[str]) -> None:
    for rid in ids:
        async with session.post(f"{url}/abort_request", json={"rid": rid}) as answer:
            await answer.read()


def _refused(found: Found, said: str) -> None:
    if found.ending is not Ending.ABORTED:  # SGLang may report an abort as an error
        found.ending, found.said = Ending.REFUSED, said[:1000]


def _take(found: Found, number: int, each: Mapping[str, Any]) -> None:
    found.answers[number] = Answer(each["output_ids"], _logprobs(each))
    meta = each["meta_info"]
    found.ids[number] = meta["id"]
    reason = meta.get("finish_reason")
    if reason is None:
        return
    if reason["type"] != "abort":
        found.whole.add(number)
    elif found.ending is Ending.DONE:
        _refused(found, json.dumps(reason))


def _logprobs(each: Mapping[str, Any]) -> list[float]:
    return [entry[0] for entry in each["meta_info"].get("output_token_logprobs") or []]
