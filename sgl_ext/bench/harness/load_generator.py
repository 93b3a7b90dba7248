"""SGLang's load generator as a function from requests at given times to timings."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.benchmark import serving

from sgl_ext.errors import ExtError


@dataclass(frozen=True)
class Request:
    """A ``/generate`` request that is sent ``at`` seconds after the start of the run."""

    prompt: str | Sequence[int]
    """Text, or token ids."""
    output_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Times of one request as its client observes them, in seconds."""

    ttft: float
    """Time to first token."""
    tpot: float
    """Mean time per output token after the first; 0 if there was only one."""
    latency: float
    cached_tokens: int
    prompt_tokens: int
    text: str
    """Text of the answer."""


class RequestError(ExtError):
    """Error for a request that was refused or interrupted; its message is the server's."""


def run(url: str, requests: Sequence[Request]) -> list[Timing]:
    """Sends ``requests`` to the server at ``url``, each at its time.

    Returns:
        Timings in the order of ``requests``.

    Raises:
        RequestError: a request failed; it is raised at the first one.
    """
    set_options()
    return asyncio.run(_run(url, requests))


def set_options() -> None:
    """Sets the options of SGLang's request functions, which are those of its module."""
    serving.set_global_args(
        argparse.Namespace(
            temperature=0.0, top_p=1.0, disable_ignore_eos=False, disable_stream=False,
            return_logprob=False, return_routed_experts=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, cache_report=True, header=None,
        )
    )  # fmt: skip


async def _run(url: str, requests: Sequence[Request]) -> list[Timing]:
    start = asyncio.get_running_loop().time()

    async def sent(request: Request) -> Timing:
        await asyncio.sleep(start + request.at - asyncio.get_running_loop().time())
        return await send(url, request)

    return await asyncio.gather(*map(sent, requests))


async def send(url: str, request: Request) -> Timing:
    """Sends a request at once, after :func:`set_options`.

    Raises:
        RequestError: the request failed.
    """
    return _timing(await serving.async_request_sglang_generate(_input(url, request)))


def _input(url: str, request: Request) -> serving.RequestFuncInput:
    is_text = isinstance(request.prompt, str)
    return serving.RequestFuncInput(
        prompt=request.prompt if is_text else list(request.prompt),
        api_url=f"{url}/generate",
        prompt_len=0,  # filled in from the answer
        output_len=request.output_tokens,
        model="",
        lora_name="",
        image_data=None,
        extra_request_body={},
    )


def _timing(output: serving.RequestFuncOutput) -> Timing:
    if not output.success:
        raise RequestError(output.error.strip()[-2000:])
    if output.prompt_len == 0:
        # The generator counts a stream that has only an error as an answer.
        raise RequestError("the server refused the request in its stream; see the server's log")
    tpot = sum(output.itl) / len(output.itl) if output.itl else 0.0
    # The generator measures to the first text, and a token may be an incomplete character.
    ttft = output.ttft or output.latency
    return Timing(
        ttft, tpot, output.latency, output.cached_tokens, output.prompt_len, output.generated_text
    )
