"""Accuracy of stock SGLang and of linked chunks on tasks like RULER's.

The text of a prompt is Paul Graham's essays, as in RULER. The chunks of a prompt are its parts of
512 tokens, in their order. Both servers use the precision that they select by default.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

from sgl_ext.bench.chunks.linked import DEFAULT, Contexts, nothing_missing, text_of
from sgl_ext.bench.chunks.prompts import CHUNK_TOKENS, Prompt, Template
from sgl_ext.bench.data.needles import essays
from sgl_ext.bench.data.scores import mean_interval
from sgl_ext.bench.field.ruler_tasks import KINDS, Task, chunks_of, hidden, score, task
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together.systems import STOCK
from sgl_ext.errors import ExtError
from sgl_ext.progress import Progress
from sgl_ext.serving.http import generate
from sgl_ext.serving.server import Server

METHODS = ("lego-16", "blend-15", DEFAULT)
_ANSWER_TOKENS = 40
"""Maximum tokens of an answer: four numbers of seven digits, each digit a token."""
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
_WINDOW = 256
"""Sentences between the possible begins of chunks: more than a chunk has."""


@dataclass(frozen=True)
class RulerSizes:
    """Prompts that are asked.

    Attributes:
        prompts: number of prompts of each kind of task; at least two.
        length: maximum tokens of a prompt.
        methods: link methods.
    """

    prompts: int
    length: int
    methods: Sequence[str]


def report_ruler(
    report: Report, stock: Server, chunks: Server, template: Template, sizes: RulerSizes
) -> None:
    """Adds the accuracy of each system on each kind of task.

    Args:
        stock: server that computes whole prompts.
        chunks: server that links chunks.

    Raises:
        ExtError: the KV of a chunk was computed instead of linked, or a request failed.
    """
    sentences = _SENTENCE_END.split(essays())
    contexts = Contexts(chunks.url, template)
    progress = Progress("rounds of RULER's tasks", sizes.prompts)
    names = (STOCK, *sizes.methods)
    scores = {kind: {name: list[float]() for name in names} for kind in KINDS}
    for number in range(sizes.prompts):
        prompts = {
            kind: prompt_of(template, sentences, task(kind, number), length=sizes.length)
            for kind in KINDS
        }
        found = _scores(stock, chunks, contexts, [*prompts.values()], sizes.methods)
        for kind, each in zip(prompts, found, strict=True):
            for name in names:
                scores[kind][name].append(each[name])
        progress.step()
    for kind in KINDS:
        _add_runs(report, kind, scores[kind])
    every = {name: [each for kind in KINDS for each in scores[kind][name]] for name in names}
    _add_runs(report, "all", every)
    accuracy = {name: statistics.mean(each) for name, each in every.items()}
    for method in sizes.methods:
        report.figures[f"ruler_lost_points_{method}"] = 100 * (accuracy[STOCK] - accuracy[method])
        if accuracy[STOCK]:
            ratio = accuracy[method] / accuracy[STOCK]
            report.figures[f"ruler_accuracy_of_stock_{method}"] = ratio


def prompt_of(
    template: Template,
    sentences: Sequence[str],
    of: Task,
    *,
    length: int,
    tokens: int = CHUNK_TOKENS,
) -> Prompt:
    """Returns the prompt of a task: parts of a text with its facts, in order, and its question.

    Args:
        sentences: the text.
        length: maximum tokens of the prompt.
        tokens: maximum tokens of a chunk.

    Raises:
        ExtError: the text is too short, or a chunk is too small for its facts.
    """
    after = template.question(of.question) + of.begin
    begin = len(template.encode(after)) - len(template.encode(template.question(of.question)))
    sizes = template.sizes(of.question, length=length - begin, tokens=tokens)
    windows = range(0, len(sentences) - _WINDOW + 1, _WINDOW)
    if len(sizes) > len(windows):
        raise ExtError(f"the text has {len(windows)} chunks of {tokens} tokens, not {len(sizes)}")
    chance = random.Random(of.name)  # noqa: S311
    places = chunks_of(len(of.facts), len(sizes), chance)
    end = template.encode("\n\n")
    chunks = []
    for number, (start, size) in enumerate(
        zip(chance.sample(windows, len(sizes)), sizes, strict=True)
    ):
        text = (template.encode(f" {each}") for each in sentences[start : start + _WINDOW])
        facts = [
            template.encode(f" {fact}")
            for fact, place in zip(of.facts, places, strict=True)
            if place == number
        ]
        chunks.append((*hidden(text, facts, size - len(end), chance), *end))
    whole = [*template.encode(template.prefix), *chain.from_iterable(chunks)]
    whole += template.encode(after)
    return Prompt(of.name, template.prefix, tuple(chunks), after, of.answers, tuple(whole))


def _scores(
    stock: Server,
    chunks: Server,
    contexts: Contexts,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
) -> list[dict[str, float]]:
    """Returns the score of each system for each prompt."""
    asked: list[tuple[int, str, str, str | list[int]]] = []
    for number, prompt in enumerate(prompts):
        asked.append((number, STOCK, stock.url, [*prompt.tokens]))
        for method in methods:
            text = text_of(prompt, contexts.create(prompt, method))
            asked.append((number, method, chunks.url, text))
    # Answers that are decoded together take little longer than one.
    with nothing_missing(chunks.url), ThreadPoolExecutor(len(asked)) as threads:
        told = threads.map(lambda one: generate(one[2], one[3], _ANSWER_TOKENS), asked)
        found: list[dict[str, float]] = [{} for _ in prompts]
        for (number, name, _, _), (text, _) in zip(asked, told, strict=True):
            found[number][name] = score(text, prompts[number].answers)
    return found


def _add_runs(report: Report, kind: str, scores: Mapping[str, Sequence[float]]) -> None:
    for name, each in scores.items():
        interval = mean_interval(each)
        report.runs.append(
            {"what": f"ruler, {kind}", "system": name, "samples": len(each)}
            | {"accuracy": interval.mean, "low": interval.low, "high": interval.high}
        )
