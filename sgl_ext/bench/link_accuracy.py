"""How far the answers to linked prompts are from those to computed ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from sgl_ext.bench import server
from sgl_ext.bench.chunk_prompts import Prompt, Template, document_prompts, question_prompts
from sgl_ext.bench.linked import DEFAULT, Contexts, asked, computed_share, generate, text_of
from sgl_ext.bench.needles import needle_prompts
from sgl_ext.bench.questions import QuestionSet
from sgl_ext.bench.report import Report
from sgl_ext.bench.scores import mean_interval
from sgl_ext.chunks.divergence import divergence
from sgl_ext.distributions import distributions

_TOP = 512
"""Tokens whose logprobs are compared."""
_DEADLINE_S = 600.0
_NEEDLE_TOKENS = 12
"""Of an answer: a number and what may come before it."""


@dataclass(frozen=True)
class AccuracySizes:
    """How much is compared."""

    methods: Sequence[str]
    as_they_are: int
    """Prompts of each set whose chunks are documents as they are."""
    merged: int
    """Prompts of each set whose chunks are documents merged."""
    merged_length: int
    """Tokens of such a prompt."""
    needles: int
    needle_length: int


class _Compared(NamedTuple):
    """A prompt linked by a method, and computed; nats."""

    first: float
    """KL(computed || linked) of the right answer's first token."""
    mean: float
    """Over all of its tokens."""
    cost: float
    """Share of the prompt's KV that was computed, by tokens and layers."""


class Accuracy:
    """Compares two servers.

    Args:
        stock: computes everything.
        ours: links.
        layers: of the model.
    """

    def __init__(
        self,
        stock: server.Server,
        ours: server.Server,
        template: Template,
        sizes: AccuracySizes,
        layers: int,
    ) -> None:
        self._stock, self._ours = stock, ours
        self._template = template
        self._sizes = sizes
        self._layers = layers
        self._contexts = Contexts(ours.url, template)

    def report(self, report: Report) -> None:
        """Adds runs and figures."""
        of_sets = {name: asked(name) for name in get_args(QuestionSet)}
        whole = [
            prompt
            for each in of_sets.values()
            for prompt in document_prompts(self._template, each, self._sizes.as_they_are)
        ]
        klt = self._report(report, "as they are", whole)
        report.figures["klt_ratio_vs_lego16"] = klt[DEFAULT] / klt["lego-16"]
        report.figures["klt_ratio_vs_blend15"] = klt[DEFAULT] / klt["blend-15"]
        if self._sizes.merged:
            merged = [
                prompt
                for each in of_sets.values()
                for prompt in question_prompts(
                    self._template, each, self._sizes.merged, length=self._sizes.merged_length
                )
            ]
            klt = self._report(report, "merged to 512", merged)
            report.figures["klt_ratio_vs_lego16_merged"] = klt[DEFAULT] / klt["lego-16"]
            report.figures["klt_ratio_vs_blend15_merged"] = klt[DEFAULT] / klt["blend-15"]
        if self._sizes.needles:
            self._report_needles(report)

    def _report(self, report: Report, what: str, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Mean divergence by method."""
        found: dict[str, list[_Compared]] = {name: [] for name in self._sizes.methods}
        for prompt in prompts:
            for name, compared in self._compare(prompt):
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
        return {name: statistics.mean(one.mean for one in each) for name, each in found.items()}

    def _compare(self, prompt: Prompt) -> Iterable[tuple[str, _Compared]]:
        answer = self._template.encode(prompt.answers[0])
        begin = len(prompt.tokens)
        right = distributions(
            self._stock.url, [*prompt.tokens, *answer], len(answer), begin,
            top=_TOP, deadline=_DEADLINE_S,
        ).distributions  # fmt: skip
        for name in self._sizes.methods:
            text = text_of(prompt, self._contexts.create(prompt, name)) + prompt.answers[0]
            linked, meta = distributions(
                self._ours.url, text, len(answer), begin, top=_TOP, deadline=_DEADLINE_S
            )
            each = [divergence(*pair) for pair in zip(right, linked, strict=True)]
            cost = computed_share(meta, begin + len(answer), self._layers)
            yield name, _Compared(each[0], statistics.mean(each), cost)

    def _report_needles(self, report: Report) -> None:
        prompts = needle_prompts(
            self._template, self._sizes.needles, length=self._sizes.needle_length
        )
        found: dict[str, list[bool]] = {name: [] for name in ("stock", *self._sizes.methods)}
        for prompt in prompts:
            (code,) = prompt.answers
            told, _ = generate(self._stock.url, list(prompt.tokens), _NEEDLE_TOKENS)
            found["stock"].append(code in told)
            for name in self._sizes.methods:
                text = text_of(prompt, self._contexts.create(prompt, name))
                told, _ = generate(self._ours.url, text, _NEEDLE_TOKENS)
                found[name].append(code in told)
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
