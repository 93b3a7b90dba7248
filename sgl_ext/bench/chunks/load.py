"""Throughput of linked prompts that arrive as a Poisson process (EPIC §4.5).

First, each system is sent more requests than it can answer, which gives its maximum throughput.
Then all systems are sent the load that SGLang, which computes whole prompts, can just sustain. Some
orders begin with the same chunk, which a radix cache finds, as it would in practice.
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
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import rotated
from sgl_ext.progress import steps
from sgl_ext.serving import server

_TOKENS = 4096
_ANSWER_TOKENS = 8
_SURGE = 4.0
"""Arrival rate at which requests queue up, relative to the rate of requests sent one by one."""
_STEADY = 0.8
"""Arrival rate at which requests do not queue up, as a share of a system's maximum throughput."""


@dataclass(frozen=True)
class LoadSizes:
    """Numbers of requests and rounds that are measured."""

    requests: int
    """Requests of each system in each round."""
    rounds: int
    methods: Sequence[str]


class _Answered(NamedTuple):
    per_s: float
    """Answers per second."""
    ttft: list[float]
    """TTFT of each request, in seconds."""


class Load:
    """Load measurement on two servers.

    Args:
        stock: server that computes whole prompts.
        ours: server that links chunks.
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
        """Adds the runs and figures of load."""
        systems = ("stock", *self._sizes.methods)
        surge = {name: _SURGE * self._alone(name) for name in systems}
        answered: dict[str, list[float]] = {name: [] for name in systems}
        for round_ in steps(range(self._sizes.rounds), "rounds of load"):
            for name in rotated(systems, round_):
                answered[name].append(self._offer(name, surge[name], round_).per_s)
        most = {name: statistics.median(each) for name, each in answered.items()}
        steady = _STEADY * most["stock"]
        for name in systems:
            there = self._offer(name, steady, 0)
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
        """Returns answers per second of requests sent one by one.

        Takes the fastest of three, because the first requests are slow.
        """
        self._create(name)
        return max(self._send(name, [0.0]).per_s for _ in range(3))

    def _offer(self, name: str, rate: float, round_: int) -> _Answered:
        """Sends requests that arrive at ``rate`` per second on average.

        At the same rate and in the same round, all systems get the same arrival times.
        """
        chance = random.Random(round_)  # noqa: S311
        arrivals = [0.0]
        while len(arrivals) < self._sizes.requests:
            arrivals.append(arrivals[-1] + chance.expovariate(rate))
        self._create(name)
        with nothing_missing(self._ours.url):
            return self._send(name, arrivals)

    def _create(self, name: str) -> None:
        """Creates the contexts of the prompts again, because their KV may have been evicted."""
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
        """Returns the system's next prompt, as text or token ids.

        Its chunks are in another order than in the system's earlier prompts. All systems get the
        same sequence of prompts.
        """
        self._taken[name] += 1
        which = self._taken[name] % len(self._prompts)
        prompt: Prompt = self._template.reordered(self._prompts[which], seed=self._taken[name])
        if name == "stock":
            return list(prompt.tokens)
        return text_of(prompt, self._ids[which])
