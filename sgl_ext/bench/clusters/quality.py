"""Answers over stored contexts, of which a part is read, and over the same text as one prompt.

Each prompt has a context of its own: passages of essays, one of which has six digits that the
question asks for, or the documents of a question. A small model finds and answers only some of them
with dense attention, so a share that is read is compared with that.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_ext.bench.chunks.linked import mixed_questions
from sgl_ext.bench.chunks.prompts import Prompt, Template
from sgl_ext.bench.clusters.answers import follows, stored
from sgl_ext.bench.data.needles import needle_prompts
from sgl_ext.bench.data.scores import f1, mean_interval
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.serving.http import send

DENSE = "dense"
SHARES = (0.05, 0.1, 0.25)
_ANSWER_TOKENS = 24
_DISTRACTORS = 6

Scores = Mapping[str, Mapping[str, float]]
"""F1 of each system's answer, and 1.0 if it contains a right answer, else 0.0."""


@dataclass(frozen=True)
class QualitySizes:
    """Sizes of the part.

    Attributes:
        needles: number of prompts of each length that hide a needle.
        lengths: tokens of these prompts.
        questions: number of questions, a third of each set.
    """

    needles: int
    lengths: Sequence[int]
    questions: int


def report_quality(
    report: Report, url: str, template: Template, sizes: QualitySizes, kept: Partial
) -> None:
    """Asks a server with stored contexts; adds scores by kind of prompt, system and share."""
    for kind, prompts in kinds(template, sizes).items():
        scores = [
            kept.find(f"quality/{kind}/{prompt.name}", partial(scores_of, url, template, prompt))
            for prompt in prompts
        ]
        add_scores(report, kind, scores)


def kinds(template: Template, sizes: QualitySizes) -> dict[str, list[Prompt]]:
    """Returns the prompts of each kind."""
    found = {
        f"needle in {length} tokens": needle_prompts(template, sizes.needles, length=length)
        for length in sizes.lengths
    }
    questions = mixed_questions(template, sizes.questions, distractors=_DISTRACTORS)
    return found | {"questions about documents": questions}


def scores_of(url: str, template: Template, prompt: Prompt) -> Scores:
    """Returns the scores of one prompt, whose context is stored meanwhile."""
    question = template.encode(prompt.question)
    context = prompt.tokens[: len(prompt.tokens) - len(question)]
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": _ANSWER_TOKENS, "stop": "\n"}
    requested: dict[str, tuple[Sequence[int], dict[str, Any]]] = {DENSE: ([*prompt.tokens], greedy)}
    with stored(url, context) as id_, ThreadPoolExecutor(1 + len(SHARES)) as threads:
        for share in SHARES:
            requested[f"{share:g}"] = (question, greedy | {"custom_params": follows(id_, share)})
        # Decoded together.
        answers = threads.map(lambda one: send(url, *one)["text"], requested.values())
        return {
            system: score(text, prompt.answers)
            for system, text in zip(requested, answers, strict=True)
        }


def score(text: str, right: Sequence[str]) -> dict[str, float]:
    """Returns the score of an answer."""
    answer = text.strip()
    return {"f1": f1(answer, right), "found": float(any(each in answer for each in right))}


def add_scores(report: Report, kind: str, scores: Sequence[Scores]) -> None:
    """Adds a run of each system, and what each share keeps of the score of dense attention."""
    measure = "found" if kind.startswith("needle") else "f1"
    dense = [each[DENSE][measure] for each in scores]
    for system in scores[0]:
        values = [each[system][measure] for each in scores]
        lost = mean_interval([a - b for a, b in zip(dense, values, strict=True)])
        of = mean_interval(values)
        run = {
            "what": f"quality, {kind}", "system": system, "samples": len(values),
            "measure": measure, "score": of.mean, "low": of.low, "high": of.high,
            "lost": lost.mean, "lost_low": lost.low, "lost_high": lost.high,
        }  # fmt: skip
        report.runs.append(run)
        if system != DENSE and any(dense):
            key = f"quality_{kind.replace(' ', '_')}_{system}_of_dense"
            report.figures[key] = statistics.mean(values) / statistics.mean(dense)
