"""One run of conversations against one server, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_ext.bench.harness import server
from sgl_ext.bench.swap import load as preempt_load
from sgl_ext.bench.swap.load import Heard, Talk, Turn

_SETTLED = 0.8
"""Tokens at the end of a run come of a batch that empties."""


@dataclass(frozen=True)
class Workload:
    """What is said.

    Attributes:
        longest: tokens of a conversation.
        pause: seconds between its turns, on average.
    """

    model: Path
    conversations: int
    longest: int
    pause: float

    def talks(self, seed: int, levels: tuple[int | None, ...] = (None,)) -> Sequence[Talk]:
        """Of which one begins in a second."""
        return preempt_load.talks(
            self.model, self.conversations, longest=self.longest, pause=self.pause, seed=seed,
            levels=levels,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What is kept; seconds, tokens, pages.

    Attributes:
        per_second: tokens that were generated in a second, until ``_SETTLED`` of them had been.
        gap: percentiles of the time between tokens in service: p50, p99, p99.9.
        computed: tokens.
        counts: of the server's swapping.
    """

    ttft: list[float]
    gap: dict[str, float]
    seconds: float
    generated: int
    per_second: float
    computed: int
    counts: dict[str, float]

    @property
    def throughput(self) -> float:
        """Generated tokens in a second, of the whole run."""
        return self.generated / self.seconds

    def percentile(self, rank: float) -> float:
        """Of the time to the first token."""
        return float(np.percentile(self.ttft, rank))


def mean_pages(talks: Sequence[Talk], page: int) -> float:
    """Of a turn in the middle of its answer."""
    pages = []
    for talk in talks:
        tokens = 0
        for turn in talk.turns:
            tokens += len(turn.said)
            pages.append((tokens + turn.answer / 2) / page)
            tokens += turn.answer
    return float(np.mean(pages))


def mean_answer(talks: Sequence[Talk]) -> float:
    """Tokens that a conversation's answers have."""
    return sum(turn.answer for talk in talks for turn in talk.turns) / len(talks)


def warm_up(one: server.Server, talks: Sequence[Talk]) -> None:
    """The first requests of a process are slow."""
    short = [Turn(turn.said, 8) for talk in talks[:4] for turn in talk.turns[:1]]
    beginnings = [Talk(f"warm {at}", 0.0, (turn,)) for at, turn in enumerate(short)]
    preempt_load.run(one.url, beginnings)


def measure(one: server.Server, talks: Sequence[Talk], rate: float) -> Run:
    """Begins with nothing in its caches.

    Args:
        talks: as if one began in a second.
        rate: how many do.
    """
    server.forget(one.url)
    before = server.live(one.url).get("swap", {})
    heard = preempt_load.run(one.url, preempt_load.at_rate(talks, rate))
    after = server.live(one.url).get("swap", {})
    counts = {name: value - before[name] for name, value in after.items()}
    return _run(heard, counts)


def _run(heard: Sequence[Heard], counts: dict[str, float]) -> Run:
    times = np.sort(np.concatenate([each.times for each in heard]))
    begin = min(each.began for each in heard)
    settled = int(_SETTLED * len(times))
    gaps = preempt_load.gaps_in_service(heard)
    recomputed = counts.get("recomputed_tokens", 0)
    computed = sum(each.prompt - each.cached + len(each.times) for each in heard)
    return Run(
        ttft=[each.ttft for each in heard],
        gap={f"p{rank:g}": float(np.percentile(gaps, rank)) for rank in (50, 99, 99.9)},
        seconds=float(times[-1] - begin),
        generated=len(times),
        per_second=settled / float(times[settled - 1] - begin),
        computed=int(computed + recomputed),
        counts=counts,
    )
