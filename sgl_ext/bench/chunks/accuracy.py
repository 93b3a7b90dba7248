"""Accuracy of linked prompts: divergence from computed prompts, and needles that are found."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from functools import partial as partial_of
from itertools import chain
from typing import NamedTuple, get_args

from sgl_ext.bench.chunks.linked import (
    DEFAULT,
    QUERY,
    Contexts,
    asked,
    computed_share,
    nothing_missing,
    text_of,
)
from sgl_ext.bench.chunks.prompts import Prompt, Template, document_prompts, question_prompts
from sgl_ext.bench.data.needles import needle_prompts
from sgl_ext.bench.data.questions import Question, QuestionSet
from sgl_ext.bench.data.scores import mean_interval
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.chunks.divergence import Distribution, divergence
from sgl_ext.distributions import distributions
from sgl_ext.serving import server
from sgl_ext.serving.http import generate

PARTS = ("documents", "methods", "merged", "needles")

_TOP = 512
"""Most likely tokens whose logprobs are compared at each position."""
_DEADLINE_S = 600.0
_NEEDLE_TOKENS = 24
"""Maximum tokens of an answer: six digits, each a token, and the sentence before them."""


@dataclass(frozen=True)
class AccuracySizes:
    """Methods and numbers of prompts that are compared."""

    compared: Sequence[str]
    """Methods that the figures compare."""
    methods: Sequence[str]
    """All methods, which are compared on fewer prompts."""
    as_they_are: int
    """Prompts of each question set whose chunks are unchanged documents."""
    by_all: int = 0
    """Prompts of each question set, among these, that are linked by all methods."""
    merged: int = 0
    """Prompts of each question set whose chunks are merged documents."""
    merged_length: int = 0
    """Tokens of a prompt of merged documents."""
    needles: int = 0
    """Prompts that hide a needle."""
    needle_length: int = 0
    """Tokens of a prompt that hides a needle."""


class _Compared(NamedTuple):
    """Comparison of a prompt linked by one method with the same prompt computed."""

    first: float
    """KL(computed || linked) of the right answer's first token, in nats."""
    mean: float
    """Mean of KL(computed || linked) over all tokens of the right answer, in nats."""
    cost: float
    """Share of the prompt's KV that was computed, over tokens and layers."""


class Accuracy:
    """Comparison of the answers of two servers.

    Args:
        stock: server that computes whole prompts.
        ours: server that links chunks.
        layers: layers of the model.
        partial: results of an earlier, interrupted run.
    """

    def __init__(
        self,
        stock: server.Server,
        ours: server.Server,
        template: Template,
        sizes: AccuracySizes,
        layers: int,
        partial: Partial,
    ) -> None:
        self._partial = partial
        self._stock, self._ours = stock, ours
        self._template = template
        self._sizes = sizes
        self._layers = layers
        self._contexts = Contexts(ours.url, template)

    def report(self, report: Report, parts: Collection[str] = PARTS) -> None:
        """Adds the runs and figures of the given :data:`PARTS`."""
        of_sets = {name: asked(name) for name in get_args(QuestionSet)}
        if "documents" in parts:
            self._report_documents(report, of_sets)
        if self._sizes.by_all and "methods" in parts:
            few = [
                prompt
                for each in of_sets.values()
                for prompt in document_prompts(self._template, each, self._sizes.by_all)
            ]
            self._divergence(report, "as they are, all methods", few, self._sizes.methods)
        if self._sizes.merged and "merged" in parts:
            merged = [
                prompt
                for each in of_sets.values()
                for prompt in question_prompts(
                    self._template, each, self._sizes.merged, length=self._sizes.merged_length
                )
            ]
            self._compare_to(
                report,
                "_merged",
                self._divergence(report, "merged to 512", merged, self._sizes.methods),
            )
        if self._sizes.needles and "needles" in parts:
            self._report_needles(report)

    def _report_documents(
        self, report: Report, of_sets: Mapping[QuestionSet, Sequence[Question]]
    ) -> None:
        """Adds the divergence of prompts whose chunks are unchanged documents."""
        whole = {
            name: document_prompts(self._template, each, self._sizes.as_they_are)
            for name, each in of_sets.items()
        }
        for name, prompts in whole.items():
            self._divergence(report, f"as they are, {name}", prompts, self._sizes.compared)
        every = list(chain.from_iterable(whole.values()))
        self._compare_to(
            report, "", self._divergence(report, "as they are", every, self._sizes.compared)
        )

    def _compare_to(
        self, report: Report, where: str, found: Mapping[str, Sequence[_Compared]]
    ) -> None:
        """Adds figures that compare two of our methods with two others.

        Args:
            where: suffix of the names of the figures.
            found: comparisons by method.
        """
        klt = {name: statistics.mean(one.mean for one in each) for name, each in found.items()}
        cost = {name: statistics.mean(one.cost for one in each) for name, each in found.items()}
        for name, other in (("lego16", "lego-16"), ("blend15", "blend-15")):
            for ours, of in ((DEFAULT, ""), (QUERY, "query15_")):
                report.figures[f"{of}klt_ratio_vs_{name}{where}"] = klt[ours] / klt[other]
                report.figures[f"{of}cost_ratio_vs_{name}{where}"] = cost[ours] / cost[other]

    def _divergence(
        self, report: Report, what: str, prompts: Sequence[Prompt], methods: Sequence[str]
    ) -> dict[str, list[_Compared]]:
        """Adds one run for each method, and returns the comparisons of ``prompts`` by method."""
        found: dict[str, list[_Compared]] = {name: [] for name in methods}
        for prompt in prompts:
            for name, compared in zip(methods, self._compare(prompt, methods), strict=True):
                found[name].append(compared)
        for name, each in found.items():
            klt = mean_interval([one.mean for one in each])
            report.runs.append(
                {
                    "what": f"divergence, documents {what}",
                    "system": name,
                    "samples": len(each),
                    "cost": statistics.mean(one.cost for one in each),
                    "kl0": statistics.mean(one.first for one in each),
                    "klt": klt.mean,
                    "klt_low": klt.low,
                    "klt_high": klt.high,
                }
            )
        return found

    def _compare(self, prompt: Prompt, methods: Sequence[str]) -> list[_Compared]:
        """Returns the comparison of a prompt for each of ``methods``."""
        # The server tokenizes an answer together with the question before it.
        question = len(self._template.encode(prompt.question))
        end = self._template.encode(prompt.question + prompt.answers[0])
        begin, count = len(prompt.tokens), len(end) - question

        @cache
        def right() -> list[Distribution]:
            computed = [*prompt.tokens[:-question], *end]
            return distributions(
                self._stock.url, computed, count, begin, top=_TOP, deadline=_DEADLINE_S
            ).distributions

        def by(method: str) -> _Compared:
            text = text_of(prompt, self._contexts.create(prompt, method)) + prompt.answers[0]
            with nothing_missing(self._ours.url):
                linked, meta = distributions(
                    self._ours.url, text, count, begin, top=_TOP, deadline=_DEADLINE_S
                )
            each = [divergence(*pair) for pair in zip(right(), linked, strict=True)]
            cost = computed_share(meta, begin + count, self._layers)
            return _Compared(each[0], statistics.mean(each), cost)

        name = f"{len(prompt.chunks)} chunks of {len(prompt.tokens)}, {prompt.name}"
        return [
            _Compared(*self._partial.find(f"{method}, {name}", partial_of(by, method)))
            for method in methods
        ]

    def _report_needles(self, report: Report) -> None:
        prompts = needle_prompts(
            self._template, self._sizes.needles, length=self._sizes.needle_length
        )
        names = ("stock", *self._sizes.compared)
        found: dict[str, list[bool]] = {name: [] for name in names}
        for prompt in prompts:
            for name in names:
                measure = partial_of(self._finds, prompt, name)
                found[name].append(self._partial.find(f"{name}, {prompt.name}", measure))
        for name, each in found.items():
            interval = mean_interval([float(one) for one in each])
            report.runs.append(
                {
                    "what": "needle",
                    "system": name,
                    "samples": len(each),
                    "found": interval.mean,
                    "low": interval.low,
                    "high": interval.high,
                }
            )
        rate = {name: statistics.mean(each) for name, each in found.items()}
        report.figures["needle_found_vs_blend15"] = rate[DEFAULT] - rate["blend-15"]
        for name in self._sizes.compared:
            report.figures[f"needle_found_of_stock_{name}"] = rate[name] / rate["stock"]

    def _finds(self, prompt: Prompt, name: str) -> bool:
        """Returns whether a system's answer contains the needle's code."""
        (code,) = prompt.answers
        if name == "stock":
            told, _ = generate(self._stock.url, list(prompt.tokens), _NEEDLE_TOKENS)
        else:
            text = text_of(prompt, self._contexts.create(prompt, name))
            with nothing_missing(self._ours.url):
                told, _ = generate(self._ours.url, text, _NEEDLE_TOKENS)
        return code in told
