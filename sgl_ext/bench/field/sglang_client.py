"""SGLang's own benchmark, ``sglang.benchmark.serving``, as functions."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.benchmark import serving

from sgl_ext.bench.harness.load_generator import RequestError


@dataclass(frozen=True)
class Served:
    """What the benchmark measured on one server; times are in seconds."""

    ttft: Sequence[float]
    """TTFT of each request whose answer has text."""
    tokens_per_s: float
    """Throughput of prompts and answers together."""
    prompt: int
    """Tokens of all prompts."""
    cached: int
    """Tokens of all prompts that were not computed."""


@dataclass(frozen=True)
class Answer:
    """Answer to one request; times are in seconds."""

    text: str
    ttft: float
    prompt: int
    """Tokens of the prompt."""
    cached: int
    """Tokens of the prompt that were not computed."""


def benchmark(url: str, model: Path, log: Path, **arguments: Any) -> Served:
    """Runs SGLang's benchmark against a server, with prompts as token ids.

    All requests are sent at once, as far as ``max_concurrency`` allows. Times of arrival would
    differ between servers: their generator also draws the prompts, unless they are in a cache.

    Args:
        model: directory of the served model.
        log: file to which the benchmark's own output and result are appended.
        arguments: further arguments of its command line, such as ``dataset_name``.

    Raises:
        RequestError: a request failed; or no answer has text.
    """
    given = _arguments(
        base_url=url, model=str(model), tokenizer=str(model), output_file=str(log), **arguments
    )
    with log.open("a") as sink, redirect_stdout(sink), redirect_stderr(sink):
        try:
            result = serving.run_benchmark(given)
        except (IndexError, SystemExit) as error:
            # It has no percentiles if all requests failed, and exits if the server is not ready.
            raise RequestError(f"SGLang's benchmark failed against {url}; read {log}") from error
    if errors := [error for error in result["errors"] if error]:
        raise RequestError(errors[0].strip()[-2000:])
    # Without text, such as of special tokens only, an answer has no TTFT. Every server gives the
    # same answers, so the same requests are left out.
    ttft = [each for each in result["ttfts"] if each]
    if not ttft:
        raise RequestError(f"{url} answered without text; read the server's log")
    return Served(
        ttft, result["total_throughput"], sum(result["input_lens"]), sum(result["cached_tokens"])
    )


async def answer(url: str, prompt: str, tokens: int) -> Answer:
    """Sends a prompt with SGLang's request function, and returns the answer of ``tokens`` tokens.

    Raises:
        RequestError: the request failed.
    """
    serving.set_global_args(_arguments())
    output = await serving.async_request_sglang_generate(
        serving.RequestFuncInput(
            prompt=prompt,
            api_url=f"{url}/generate",
            prompt_len=0,  # filled in from the answer
            output_len=tokens,
            model="",
            lora_name="",
            image_data=None,
            extra_request_body={},
        )
    )
    if not output.success:
        raise RequestError(output.error.strip()[-2000:])
    if output.prompt_len == 0:
        # The function counts a stream that has only an error as an answer.
        raise RequestError("the server refused the request in its stream; see the server's log")
    ttft = output.ttft or output.latency  # as above: an answer may have no text
    return Answer(output.generated_text, ttft, output.prompt_len, output.cached_tokens)


def _arguments(**given: Any) -> argparse.Namespace:
    """Returns the arguments of the benchmark's command line: the given ones, and its defaults."""
    defaults: dict[str, Any] = {
        "backend": "sglang", "base_url": None, "host": "127.0.0.1", "port": None,
        "ready_check_timeout_sec": 60, "model": None, "served_model_name": None, "tokenizer": None,
        "tokenize_prompt": True, "dataset_name": "", "dataset_path": "", "num_prompts": 1,
        "sharegpt_output_len": None, "sharegpt_context_len": None, "random_input_len": 0,
        "random_output_len": 0, "random_range_ratio": 0.0, "request_rate": math.inf,
        "max_concurrency": None, "warmup_requests": 0, "flush_cache": False, "seed": 0,
        "disable_tqdm": True, "disable_stream": False, "disable_ignore_eos": False,
        "temperature": 0.0, "top_p": 1.0, "return_logprob": False, "top_logprobs_num": 0,
        "token_ids_logprob": None, "logprob_start_len": -1, "return_routed_experts": False,
        "cache_report": True, "header": None, "extra_request_body": None, "tag": None,
        "output_file": None, "output_details": False, "goodput": None, "plot_throughput": False,
        "profile": False, "pd_separated": False, "lora_name": None,
        "lora_request_distribution": "uniform", "lora_zipf_alpha": 1.5,
    }  # fmt: skip
    return argparse.Namespace(**defaults | given)
