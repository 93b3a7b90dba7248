"""How many linked prompts a second are answered when they arrive as a Poisson process (EPIC §4.5).

Each system is first given more than it can answer, which says what it answers at most; then all
are given what SGLang, which computes everything, can just keep up with. Some orders begin with the
same chunk, which a radix cache finds, as it would in practice.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_ext.bench.chunks.linked import DEFAULT, Contexts, Ids, asked, nothing_missing, text_of
from sgl_ext.bench.chunks.prompts import Prompt, Template, question_prompts
from sgl_ext.bench.harness import server
from sgl_ext.bench.harness.report import Report, summary

_TOKENS = 4096
_ANSWER_TOKENS = 8
_SURGE = 4.0
"""Arrivals at this many times the rate at which single requests are answered pile up."""
_STEADY = 0.8
"""Arrivals at this share of what a system answers at most do not pile up."""


@dataclass(frozen=True)
class LoadSizes:
    """How much is measured."""

    requests: int
    """Of each system in each round."""
    rounds: int
    methods: Sequence[str]


class _Answered(NamedTuple):
    per_s: float
    ttft: list[float]
    """Seconds."""


class Load:
    """Puts two servers under load.

    Args:
        stock: computes everything.
        ours: links.
    """

    def __init__(
        self, stock: server.Server, ours: server.Server, template: Template, sizes: LoadSizes
    ) -> None:
        self._stock, self._ours = stock, ours
        self._template = template
        self._sizes = sizes
        self._prompts = question_prompts(template, asked("hotpotqa"), 2, length=_TOKENS)
        self._contexts = Contexts(ours.url, template)
        self._ids: Sequence[Ids] = ()
        self._taken: Counter[str] = Counter()

    def report(self, report: Report) -> None:
        """Adds runs and figures."""
        systems = ("stock", *self._sizes.methods)
        surge = {name: _SURGE * self._alone(name) for name in systems}
        answered: dict[str, list[float]] = {name: [] for name in systems}
        for round_ in range(self._sizes.rounds):
            for place in range(len(systems)):
                name = systems[(round_ + place) % len(systems)]
                answered[name].append(self._offer(name, surge[name]).per_s)
        most = {name: statistics.median(each) for name, each in answered.items()}
        steady = _STEADY * most["stock"]
        for name in systems:
            there = self._offer(name, steady)
            row = {
                "what": "load",
                "system": name,
                "rounds": self._sizes.rounds,
                "answers_per_s_at_most": most[name],
                "arrivals_per_s": steady,
                "samples": len(there.ttft),
            }
            report.runs.append(row | summary(there.ttft, "ttft_ms", 1e3))
        report.figures["throughput_speedup_vs_full"] = most[DEFAULT] / most["stock"]
        report.figures["throughput_speedup_vs_blend15"] = most[DEFAULT] / most["blend-15"]

    def _alone(self, name: str) -> float:
        """Answers per second, one request after the other; the first ones are slow."""
        self._create(name)
        return max(self._send(name, [0.0]).per_s for _ in range(3))

    def _offer(self, name: str, rate: float) -> _Answered:
        """What comes of requests that arrive at ``rate`` per second, the same times for all."""
        chance = random.Random(len(self._prompts))  # noqa: S311
        arrivals = [0.0]
        while len(arrivals) < self._sizes.requests:
            arrivals.append(arrivals[-1] + chance.expovariate(rate))
        self._create(name)
        with nothing_missing(self._ours.url):
            return self._send(name, arrivals)

    def _create(self, name: str) -> None:
        """Their KV may have gone since."""
        if name != "stock":
            self._ids = [self._contexts.create(prompt, name) for prompt in self._prompts]

    def _send(self, name: str, arrivals: Sequence[float]) -> _Answered:
        from sgl_ext.bench.harness.load_generator import Request, run

        running = self._stock if name == "stock" else self._ours
        requests = [Request(self._next(name), _ANSWER_TOKENS, at) for at in arrivals]
        begin = time.monotonic()
        timings = run(running.url, requests)
        return _Answered(
            len(requests) / (time.monotonic() - begin), [timing.ttft for timing in timings]
        )

    def _next(self, name: str) -> str | list[int]:
        """A prompt of the same chunks in another order than the system's last ones, the same for
        all systems."""
        self._taken[name] += 1
        which = self._taken[name] % len(self._prompts)
        prompt: Prompt = self._template.reordered(self._prompts[which], seed=self._taken[name])
        if name == "stock":
            return list(prompt.tokens)
        return text_of(prompt, self._ids[which])
