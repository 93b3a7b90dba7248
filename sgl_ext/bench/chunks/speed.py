"""TTFT of linked prompts, by the length of the prompt.

Prompts longer than the model's positions need servers whose model has more of them; their answers
mean nothing, but computing them takes as long as with a model that was trained on such lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any

from sgl_ext.bench.chunks.linked import (
    DEFAULT,
    Contexts,
    asked,
    nothing_missing,
    text_of,
)
from sgl_ext.bench.chunks.prompts import (
    CHUNK_TOKENS,
    Prompt,
    Template,
    document_prompts,
    question_prompts,
)
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio_of_medians, rotated
from sgl_ext.serving import server


@dataclass(frozen=True)
class SpeedSizes:
    """Numbers of prompts and orders that are measured."""

    lengths: Mapping[int, int]
    """Number of prompts, by their length in tokens."""
    orders: int
    """Maximum number of orders of each prompt's chunks."""
    methods: Sequence[str]
    as_they_are: int
    """Number of prompts whose chunks are unchanged documents."""
    stock_most: int = 8192
    """Length of the longest prompts that the stock server computes, in tokens."""
    chunk: int = CHUNK_TOKENS
    """Tokens of a chunk of merged documents."""


class Speed:
    """TTFT measurement on two servers.

    Args:
        stock: server that computes whole prompts.
        ours: server that links chunks.
        partial: results of an earlier, interrupted run.
    """

    def __init__(
        self,
        stock: server.Server,
        ours: server.Server,
        template: Template,
        sizes: SpeedSizes,
        partial: Partial,
    ) -> None:
        self._stock, self._ours = stock, ours
        self._partial = partial
        self._template = template
        self._sizes = sizes
        self._contexts = Contexts(ours.url, template)
        self._asked = asked("hotpotqa")

    def report(self, report: Report) -> None:
        """Adds the runs and figures of TTFT."""
        merged = {length: self._merged(length) for length in self._sizes.lengths}
        for length, systems in merged.items():
            _report(report, f"ttft, chunks of 512, {length} tokens", systems)
        _report(report, "ttft, documents as they are", self._as_they_are())
        at_4k = merged[4096]
        figures = report.figures
        figures["ttft_speedup_vs_full_4k"] = ratio_of_medians(at_4k["stock"], at_4k[DEFAULT])
        figures["ttft_speedup_vs_blend15_4k"] = ratio_of_medians(at_4k["blend-15"], at_4k[DEFAULT])

    def report_lengths(self, report: Report) -> None:
        """Adds the runs of TTFT, and figures of how it grows with the length of the prompt.

        The growth between two lengths is the exponent of the length: 0 if TTFT does not depend on
        it, 1 if it is proportional to it.
        """
        merged = {length: self._merged(length) for length in self._sizes.lengths}
        of = "" if self._sizes.chunk == CHUNK_TOKENS else f"_chunks_{self._sizes.chunk}"
        for length, systems in merged.items():
            _report(report, f"ttft, chunks of {self._sizes.chunk}, {length} tokens", systems)
            for name in (each for each in systems if each != DEFAULT):
                report.figures[f"ttft_speedup{of}_vs_{name}_{length}"] = ratio_of_medians(
                    systems[name], systems[DEFAULT]
                )
        shortest = min(merged)
        for length, systems in merged.items():
            if length == shortest:
                continue
            for name, seconds in systems.items():
                grown = ratio_of_medians(seconds, merged[shortest][name])
                report.figures[f"ttft_growth{of}_of_{name}_{length}"] = math.log(grown) / math.log(
                    length / shortest
                )

    def _merged(self, length: int) -> dict[str, list[float]]:
        """Returns the TTFTs of prompts of merged documents in seconds, by system."""
        by_order = [
            question_prompts(
                self._template, self._asked, self._sizes.lengths[length] + 1,
                length=length, tokens=self._sizes.chunk, seed=order,
            )
            for order in range(self._sizes.orders)
        ]  # fmt: skip
        what = f"{length} tokens in chunks of {self._sizes.chunk}"
        return self._first_tokens(what, by_order, self._systems(length))

    def _systems(self, length: int) -> tuple[str, ...]:
        stock = ("stock",) if length <= self._sizes.stock_most else ()
        return (*stock, *self._sizes.methods)

    def _as_they_are(self) -> dict[str, list[float]]:
        most = self._sizes.as_they_are + 1
        by_order = [
            document_prompts(self._template, self._asked, most, seed=order)
            for order in range(self._sizes.orders)
        ]
        return self._first_tokens("as they are", by_order, self._systems(0))

    def _first_tokens(
        self, what: str, by_order: Sequence[Sequence[Prompt]], systems: Sequence[str]
    ) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in systems}
        warm, *others = zip(*by_order, strict=True)
        names = [f"ttft, {what}, {prompts[0].name}" for prompts in others]
        if not all(name in self._partial for name in names):
            self._times(warm[:1], 0, systems)  # the first requests of a process are slow
        for number, (name, prompts) in enumerate(zip(names, others, strict=True)):
            times = self._partial.find(name, partial_of(self._times, prompts, number, systems))
            for system, seconds in times.items():
                found[system] += seconds
        return found

    def _times(
        self, orders: Sequence[Prompt], number: int, systems: Sequence[str]
    ) -> dict[str, list[float]]:
        """Returns the TTFT of each order of a prompt in seconds, by system."""
        from sgl_ext.bench.harness.load_generator import Request, run

        found: dict[str, list[float]] = {name: [] for name in systems}
        with nothing_missing(self._ours.url):
            named = {name: self._contexts.create(orders[0], name) for name in self._sizes.methods}
            # Orders that begin with the same chunk would share a prefix.
            different = {prompt.chunks[0]: prompt for prompt in orders}.values()
            for order, prompt in enumerate(different):
                requests = {"stock": (self._stock.url, Request(list(prompt.tokens), 1))} | {
                    name: (self._ours.url, Request(text_of(prompt, ids), 1))
                    for name, ids in named.items()
                }
                for system in rotated(systems, number + order):
                    url, request = requests[system]
                    found[system].append(run(url, [request])[0].ttft)
        return found


def _report(report: Report, what: str, systems: Mapping[str, Sequence[float]]) -> None:
    stock = systems.get("stock")
    for name, seconds in systems.items():
        row: dict[str, Any] = {"what": what, "system": name, "samples": len(seconds)}
        if stock is not None:
            row["speedup"] = ratio_of_medians(stock, seconds)
        report.runs.append(row | summary(seconds, "ttft_ms", 1e3))
