"""Linking chunks against computing them: how soon the first token comes, and how far it is off.

Prompts are documents of real questions in 512-token chunks, a question behind them, the chunks of
each prompt in several orders, so that prompts share no prefix. Contexts are created before anything
is timed, as an application would. ``stock`` is SGLang with its radix cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests

from sgl_ext.bench import server
from sgl_ext.bench.chunk_prompts import Prompt, Template, question_prompts
from sgl_ext.bench.questions import questions
from sgl_ext.bench.report import Report
from sgl_ext.bench.sampling import ratio_of_medians
from sgl_ext.chunks.compose import mark
from sgl_ext.chunks.divergence import mean_divergence
from sgl_ext.client import ContextCache
from sgl_ext.models import SMOLLM2, prepare

DEFAULT = "primed+offline-16"
METHODS = ("naive", "lego-0", "lego-2", "lego-8", "lego-16", "blend-15", "primed", "primed+head-8")
_PAGE = 16
_TOP = 512
"""Tokens whose logprobs are compared."""
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    lengths: Mapping[int, int]
    """Prompts of each number of tokens."""
    orders: int
    """Of each prompt's chunks, at most."""
    methods: Sequence[str]
    accuracy: int
    """Prompts of each set whose answers are compared."""
    accuracy_tokens: int
    """Of these prompts."""
    pool: int


_QUICK = Sizes({1024: 2, 4096: 2}, 2, ("lego-16", "blend-15", DEFAULT), 6, 1536, 40_000)
_WHOLE = Sizes({1024: 4, 2048: 4, 4096: 4, 7168: 2}, 3, (*METHODS, DEFAULT), 200, 1536, 120_000)


def run(*, quick: bool, out: Path) -> Report:
    sizes = _QUICK if quick else _WHOLE
    from transformers import AutoTokenizer

    model = prepare(SMOLLM2)
    template = Template(AutoTokenizer.from_pretrained(model))
    report = Report("link", {"quick": quick, "page": _PAGE, "chunk_tokens": 512} | vars(sizes))
    arguments = ("--max-total-tokens", str(sizes.pool), "--page-size", str(_PAGE))
    config = ("--enable-ext", "--ext-config", '{"chunks": {}}')
    systems = [server.System("stock", arguments), server.System("chunks", (*arguments, *config))]
    with server.serve(systems, model, out / "logs") as (stock, ours):
        ttft = {
            length: _first_tokens(stock, ours, template, sizes, length) for length in sizes.lengths
        }
        _report_ttft(report, ttft)
        _report_accuracy(report, _answers(stock, ours, template, sizes))
    return report


def _first_tokens(
    stock: server.Server, ours: server.Server, template: Template, sizes: Sizes, length: int
) -> dict[str, list[float]]:
    """Seconds to the first token of each system."""
    from sgl_ext.engine.load_generator import Request
    from sgl_ext.engine.load_generator import run as send

    asked = questions("hotpotqa")
    cache = ContextCache(ours.url)
    found: dict[str, list[float]] = {name: [] for name in ("stock", *sizes.methods)}
    count = sizes.lengths[length] + 1
    by_order = [
        question_prompts(template, asked, count, length=length, seed=order)
        for order in range(sizes.orders)
    ]
    for number, prompts in enumerate(zip(*by_order, strict=True)):
        named = {name: _create(cache, prompts[0], name) for name in sizes.methods}
        # Two chunks have two orders; an order that comes again is a prefix hit.
        different = {prompt.chunks: prompt for prompt in prompts}.values()
        for order, prompt in enumerate(different):
            requests_ = {"stock": (stock, Request(list(prompt.tokens), 1))} | {
                name: (ours, Request(_text(prompt, ids), 1)) for name, ids in named.items()
            }
            names = [*found]
            first = (number + order) % len(names)
            for name in names[first:] + names[:first]:
                running, request = requests_[name]
                timing = send(running.url, [request])[0]
                if number:  # the first ones in a process are slow
                    found[name].append(timing.ttft)
    return found


def _report_ttft(report: Report, ttft: Mapping[int, Mapping[str, list[float]]]) -> None:
    for length, systems in ttft.items():
        for name, seconds in systems.items():
            report.runs.append(
                {
                    "what": "ttft",
                    "tokens": length,
                    "system": name,
                    "samples": len(seconds),
                    "ttft_ms": 1e3 * statistics.median(seconds),
                    "speedup": ratio_of_medians(systems["stock"], seconds),
                }
            )
    at_4k = ttft[4096]
    report.figures["ttft_speedup_vs_full_4k"] = ratio_of_medians(at_4k["stock"], at_4k[DEFAULT])
    report.figures["ttft_speedup_vs_blend15_4k"] = ratio_of_medians(
        at_4k["blend-15"], at_4k[DEFAULT]
    )
    medians = [statistics.median(systems[DEFAULT]) for systems in ttft.values()]
    exponent, _ = np.polyfit(np.log([*ttft]), np.log(medians), 1)
    report.figures["ttft_exponent"] = float(exponent)


def _answers(
    stock: server.Server, ours: server.Server, template: Template, sizes: Sizes
) -> dict[str, list[tuple[float, float]]]:
    """Of each method and prompt: mean KL(stock || method) over the tokens of the right answer, and
    the share of the prompt that was computed."""
    cache = ContextCache(ours.url)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sizes.methods}
    for set_ in ("hotpotqa", "2wikimultihopqa", "musique"):
        prompts = question_prompts(
            template, questions(set_), sizes.accuracy, length=sizes.accuracy_tokens, tokens=128
        )
        for prompt in prompts:
            answer = template.encode(prompt.answers[0])
            right = _distributions(stock, [*prompt.tokens, *answer], len(answer))[0]
            for name in sizes.methods:
                text = _text(prompt, _create(cache, prompt, name)) + prompt.answers[0]
                logprobs, meta = _distributions(ours, text, len(answer), len(prompt.tokens))
                (entry,) = meta["ext"]
                computed = 1 - entry["linked"] / len(prompt.tokens)
                found[name].append((mean_divergence(right, logprobs), computed))
    return found


def _report_accuracy(report: Report, found: Mapping[str, list[tuple[float, float]]]) -> None:
    klt = {}
    for name, each in found.items():
        divergences, costs = zip(*each, strict=True)
        klt[name] = statistics.mean(divergences)
        report.runs.append(
            {
                "what": "accuracy",
                "system": name,
                "samples": len(each),
                "klt": klt[name],
                "computed_share": statistics.mean(costs),
            }
        )
    report.figures["klt_ratio_vs_lego16"] = klt[DEFAULT] / klt["lego-16"]
    report.figures["klt_ratio_vs_blend15"] = klt[DEFAULT] / klt["blend-15"]


def _create(cache: ContextCache, prompt: Prompt, method: str) -> dict[tuple[int, ...], str]:
    chunks = sorted(prompt.chunks)  # those of another order are the same
    created = cache.create(chunks, method=method, prefix=prompt.prefix)
    return {chunk: context.id for chunk, context in zip(chunks, created, strict=True)}


def _text(prompt: Prompt, ids: Mapping[tuple[int, ...], str]) -> str:
    return "".join([prompt.prefix, *(mark(ids[chunk]) for chunk in prompt.chunks), prompt.question])


def _distributions(
    running: server.Server, prompt: str | list[int], last: int, start: int | None = None
) -> tuple[list[dict[int, float]], dict[str, Any]]:
    """Logprobs of the likeliest tokens at each of the ``last`` tokens of a prompt, and the answer's
    ``meta_info``."""
    field = "text" if isinstance(prompt, str) else "input_ids"
    # The logprob of a token is told with the one before it.
    begin = (len(prompt) - last if start is None else start) - 1
    body = {
        field: prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": begin,
        "top_logprobs_num": _TOP,
    }
    answer = requests.post(f"{running.url}/generate", json=body, timeout=_DEADLINE_S)
    answer.raise_for_status()
    meta: dict[str, Any] = answer.json()["meta_info"]
    tops = [top for top in meta["input_top_logprobs"] if top is not None][-last:]
    return [{token: logprob for logprob, token, _ in top} for top in tops], meta
