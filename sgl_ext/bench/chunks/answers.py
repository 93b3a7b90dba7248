"""Quality of a model's answers when the documents of its prompts are linked: F1.

The questions are of HotpotQA, 2WikiMultihopQA and MuSiQue, equally many of each. Each document is
an unchanged chunk. A prompt has the gold documents of a question and three others, because all of
them take minutes per question on a small machine. With ``--needles`` the chunks are passages of
essays, one of which has six digits that the question asks for. ``full`` computes the same prompts
on the same server. All systems use the precision that the server selects by default, so the
measured loss is the loss that a user would see. A whole run takes hours; an interrupted run
continues where it stopped if it is given the same ``--out``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial as partial_of
from pathlib import Path
from typing import Any

from sgl_ext.bench.chunks.linked import (
    DEFAULT,
    PAGE,
    Contexts,
    computed_share,
    mixed_questions,
    nothing_missing,
    systems,
    text_of,
)
from sgl_ext.bench.chunks.prompts import Prompt, Template
from sgl_ext.bench.data.needles import needle_prompts
from sgl_ext.bench.data.scores import exact_match, f1, mean_interval
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.models import QWEN_CODER, SMOLLM2, prepare
from sgl_ext.serving import server
from sgl_ext.serving.http import generate

_METHODS = ("naive", "lego-2", "lego-8", "lego-16", "blend-15", DEFAULT)
_QUESTIONS = 99
_DISTRACTORS = 3
_NEEDLE_TOKENS = 2048
"""Tokens of a prompt that hides a needle."""
_ANSWER_TOKENS = 24
_POOL = 60_000
_START_DEADLINE_S = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument(
        "--questions", type=int, default=_QUESTIONS, metavar="COUNT",
        help=f"number of questions, a third of each set (default: {_QUESTIONS}; 6 with --quick)",
    )  # fmt: skip
    parser.add_argument(
        "--needles",
        action="store_true",
        help="ask for needles instead of the questions of the sets",
    )
    parser.add_argument(
        "--method",
        action="append",
        metavar="METHOD",
        help=f"link method to compare; may be repeated (default: {', '.join(_METHODS)})",
    )


def run(*, quick: bool, out: Path, options: argparse.Namespace) -> Report:
    from transformers import AutoConfig

    model = prepare(SMOLLM2 if quick else QWEN_CODER)
    count = 6 if quick else options.questions
    methods = (*(options.method or _METHODS),)
    template = Template.of_model(model)
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    prompts = _prompts(template, count, needles=options.needles)
    name = "chunks_answers-needles" if options.needles else "chunks_answers"
    config = {
        "model": model.name,
        "questions": count,
        "distractors": _DISTRACTORS,
        "methods": methods,
        "page": PAGE,
    }
    report = Report(name, {"quick": quick, **config})
    partial = Partial(out, name, config, quick=quick)
    if all(prompt.name in partial for prompt in prompts):
        scores = [partial.find(prompt.name, dict) for prompt in prompts]
    else:
        _, system = systems(_POOL)
        with server.serve([system], model, out / "logs", deadline=_START_DEADLINE_S) as (ours,):
            contexts = Contexts(ours.url, template)
            scores = []
            for prompt in prompts:
                measure = partial_of(_scores, ours.url, contexts, prompt, layers, methods)
                scores.append(partial.find(prompt.name, measure))
    _report(report, scores, methods)
    partial.forget()
    return report


def _prompts(template: Template, count: int, *, needles: bool) -> list[Prompt]:
    if needles:
        return needle_prompts(template, count, length=_NEEDLE_TOKENS)
    return mixed_questions(template, count, distractors=_DISTRACTORS)


def _scores(
    url: str, contexts: Contexts, prompt: Prompt, layers: int, methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns the score of each system for one prompt."""
    texts = {method: text_of(prompt, contexts.create(prompt, method)) for method in methods}
    answered = partial_of(generate, url, tokens=_ANSWER_TOKENS, stop="\n")
    # Decoded together, the requests take the time of one: a step reads the weights once for all.
    with nothing_missing(url), ThreadPoolExecutor(1 + len(texts)) as threads:
        full, *linked = threads.map(answered, (list(prompt.tokens), *texts.values()))
    text, _ = full
    scores = {"full": _score(text, prompt.answers, 1.0)}
    for method, (text, meta) in zip(texts, linked, strict=True):
        cost = computed_share(meta, len(prompt.tokens), layers)
        scores[method] = _score(text, prompt.answers, cost)
    return scores


def _score(text: str, right: Sequence[str], cost: float) -> dict[str, Any]:
    answer = text.strip()
    return {
        "answer": answer,
        "f1": f1(answer, right),
        "exact": exact_match(answer, right),
        "found": any(each in answer for each in right),
        "cost": cost,
    }


def _report(
    report: Report, scores: Sequence[dict[str, dict[str, Any]]], methods: Sequence[str]
) -> None:
    for name in ("full", *methods):
        mean = mean_interval([each[name]["f1"] for each in scores])
        lost = mean_interval([each["full"]["f1"] - each[name]["f1"] for each in scores])
        report.runs.append(
            {
                "what": "answers",
                "system": name,
                "samples": len(scores),
                "cost": statistics.mean(each[name]["cost"] for each in scores),
                "f1": mean.mean,
                "f1_low": mean.low,
                "f1_high": mean.high,
                "lost": lost.mean,
                "lost_low": lost.low,
                "lost_high": lost.high,
                "exact": statistics.mean(each[name]["exact"] for each in scores),
                "found": statistics.mean(each[name]["found"] for each in scores),
            }
        )
        report.figures[f"f1_lost_points_{name}"] = 100 * lost.mean
