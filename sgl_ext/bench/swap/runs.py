"""Runs of conversations against one server, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_ext.bench.swap import load
from sgl_ext.bench.swap.load import Heard, Talk, Turn
from sgl_ext.serving import server
from sgl_ext.serving.http import forget, live

EFFICIENCY_RANKS = (5, 50, 95, 99, 99.9)
_SETTLED = 0.8
"""Share of a run's tokens that its steady throughput covers; later, the batch drains."""


@dataclass(frozen=True)
class Workload:
    """Conversations of a run.

    Attributes:
        model: directory of the model.
        conversations: number of conversations.
        longest: maximum tokens of a conversation.
        pause: mean pause between the turns of a conversation, in seconds.
    """

    model: Path
    conversations: int
    longest: int
    pause: float

    def talks(self, seed: int, levels: tuple[int | None, ...] = (None,)) -> Sequence[Talk]:
        """Returns the conversations of a seed, one of which begins per second."""
        return load.talks(
            self.model, self.conversations, longest=self.longest, pause=self.pause, seed=seed,
            levels=levels,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Results of one run.

    Attributes:
        ttft: TTFT of each turn, in seconds.
        gap: percentiles of the time between tokens in service, in seconds: p50, p99, p99.9.
        seconds: time from the first request to the last token.
        generated: number of generated tokens.
        per_second: generated tokens per second, up to the share ``_SETTLED`` of them.
        efficiency: percentiles of the generated tokens per second of intervals of 5 iterations:
            p5, p50, p95, p99, p99.9.
        computed: number of tokens that were computed, including generated and recomputed ones.
        counts: increments of the server's swap counters.
    """

    ttft: list[float]
    gap: dict[str, float]
    seconds: float
    generated: int
    per_second: float
    efficiency: dict[str, float]
    computed: int
    counts: dict[str, float]

    @property
    def throughput(self) -> float:
        """Generated tokens per second, over the whole run."""
        return self.generated / self.seconds

    def percentile(self, rank: float) -> float:
        """Returns a percentile of the TTFT, in seconds."""
        return float(np.percentile(self.ttft, rank))


def mean_pages(talks: Sequence[Talk], page: int) -> float:
    """Returns the mean number of pages of a turn in the middle of its answer."""
    pages = []
    for talk in talks:
        tokens = 0
        for turn in talk.turns:
            tokens += len(turn.said)
            pages.append((tokens + turn.answer / 2) / page)
            tokens += turn.answer
    return float(np.mean(pages))


def mean_answer(talks: Sequence[Talk]) -> float:
    """Returns the mean number of tokens that the answers of a conversation have."""
    return sum(turn.answer for talk in talks for turn in talk.turns) / len(talks)


def warm_up(one: server.Server, talks: Sequence[Talk]) -> None:
    """Sends a few short requests, because the first requests of a process are slow."""
    short = [Turn(turn.said, 8) for talk in talks[:4] for turn in talk.turns[:1]]
    beginnings = [Talk(f"warm {at}", 0.0, (turn,)) for at, turn in enumerate(short)]
    load.run(one.url, beginnings)


def measure(one: server.Server, talks: Sequence[Talk], rate: float) -> Run:
    """Measures a run that begins with empty caches.

    Args:
        talks: conversations with arrival times for one per second.
        rate: conversations that begin per second.
    """
    forget(one.url)
    before = _counts(one)
    heard = load.run(one.url, load.at_rate(talks, rate))
    after = _counts(one)
    return _run(heard, {name: value - before[name] for name, value in after.items()})


def _counts(one: server.Server) -> dict[str, float]:
    """Returns the counters of a server; none for a stock one."""
    state = live(one.url).get("swap", {})
    return {name: value for name, value in state.items() if name != "experiment"}


def _run(heard: Sequence[Heard], counts: dict[str, float]) -> Run:
    times = np.sort(np.concatenate([each.times for each in heard]))
    begin = min(each.began for each in heard)
    settled = int(_SETTLED * len(times))
    gaps, efficiency = load.gaps_in_service(heard), load.token_efficiency(heard)
    recomputed = counts.get("recomputed_tokens", 0)
    computed = sum(each.prompt - each.cached + len(each.times) for each in heard)
    return Run(
        ttft=[each.ttft for each in heard],
        gap={f"p{rank:g}": float(np.percentile(gaps, rank)) for rank in (50, 99, 99.9)},
        seconds=float(times[-1] - begin),
        generated=len(times),
        per_second=settled / float(times[settled - 1] - begin),
        efficiency={
            f"p{rank:g}": float(np.percentile(efficiency, rank)) for rank in EFFICIENCY_RANKS
        },
        computed=int(computed + recomputed),
        counts=counts,
    )
