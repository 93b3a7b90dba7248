"""Runs of the same conversations on several systems, at a load relative to what they can answer.

Loads are relative to the throughput that our system would have if swapping cost nothing. This is
measured with host memory as it is and all conversations arriving at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.harness.sampling import rotated
from sgl_ext.bench.swap.runs import Run, Workload, mean_answer, mean_pages, measure, warm_up
from sgl_ext.bench.swap.systems import DEFINITIONS, OURS, PAGE, Link, systems
from sgl_ext.serving import server

_AT_ONCE = 1000.0
"""Arrival rate at which all conversations arrive at once, in conversations per second."""
HEAVY = 1.3
"""Load that no system sustains."""
_START_DEADLINE_S = 900.0
"""Deadline for the start of all servers side by side, in seconds."""

Runs = Mapping[str, Sequence[Run]]
"""Runs of each system, in the order of the seeds."""


@dataclass(frozen=True)
class Sizes:
    conversations: int
    longest: int
    """Maximum tokens of a conversation, including its answers."""
    pause: float
    """Mean pause between turns, in seconds."""
    pool: int
    """Device pool, in tokens."""
    host: str
    """Capacity of host memory for swapped-out requests and for prefixes."""
    quantum: int
    """Iterations between draws of the priorities, unless the part sets it."""
    seeds: Sequence[int]
    few_seeds: Sequence[int]
    """Seeds of the parts that need fewer runs."""
    speeds: Mapping[float, Sequence[int]] = field(default_factory=dict)
    """Seeds of the part ``speeds``, by the time of a copy on its link relative to the link of the
    others; 0 for host memory as it is."""


class Offers:
    """Loads that are offered to systems.

    Args:
        report: report that gets a row for each system and load.
        model: directory of the model that is served.
        out: directory of the results that an interrupted run has kept, and of the logs.
        name: name of the kept results.
    """

    def __init__(
        self, report: Report, model: Path, sizes: Sizes, out: Path, name: str, *, quick: bool
    ) -> None:
        from transformers import AutoConfig

        self.report, self.sizes = report, sizes
        self._layers: int = AutoConfig.from_pretrained(model).num_hidden_layers
        self._workload = Workload(model, sizes.conversations, sizes.longest, sizes.pause)
        self._logs = out / "logs" / "swap"
        # Only sizes that measurements depend on: few_seeds, because arrival rates follow from the
        # capacity with them. Further seeds may be added to an interrupted run.
        decisive = ("conversations", "longest", "pause", "pool", "host", "quantum", "few_seeds")
        kept = {name: value for name, value in asdict(sizes).items() if name in decisive}
        self._kept = Partial(out, f"swap-{name}", kept | DEFINITIONS, quick=quick)
        self.trace = trace("random", sizes.quantum)

    def forget(self) -> None:
        """Deletes the results that were kept for an interrupted run."""
        self._kept.forget()

    def offer(
        self,
        what: str,
        names: Sequence[str],
        policy: Mapping[str, Any],
        load: float,
        *,
        linked: bool,
        levels: tuple[int | None, ...] = (None,),
        seeds: Sequence[int] | None = None,
        times: float = 1.0,
        host: str | None = None,
    ) -> Runs:
        """Sends the same conversations at the same times to each system, for each seed.

        Args:
            what: name of the runs.
            names: systems that are compared.
            policy: ``policy`` or ``trace``, and ``quantum``, of all systems but the stock ones.
            load: arrival rate, relative to the throughput if swapping cost nothing.
            linked: True to put the systems behind the link.
            levels: priorities, of which each conversation draws one.
            seeds: seeds of the conversations; None for those of the sizes.
            times: time of a copy relative to the link of the other parts.
            host: capacity of host memory; None for that of the sizes.
        """
        seeds = self.sizes.seeds if seeds is None else seeds
        talks = [self._workload.talks(seed, levels) for seed in seeds]
        ideal = self._capacity(OURS, linked=False)
        link = replace(self._link(), times=times) if linked else None
        names_of = {name: [f"{what}/{load:.3f}/{name}/{seed}" for seed in seeds] for name in names}
        missing = [name for name in names if any(key not in self._kept for key in names_of[name])]
        with self._serve(missing, policy, link, host) as servers:
            for place, said in enumerate(talks):
                rate = load * ideal / mean_answer(said)
                for one in rotated(servers, place):
                    key = names_of[one.system.name][place]
                    self._run(key, partial(measure, one, said, rate))
        runs = {name: [self._run(key) for key in keys] for name, keys in names_of.items()}
        for name, each in runs.items():
            link_of = "emulated" if linked else "as it is"
            row = {"what": what, "system": name, "load": load, "link": link_of, **policy}
            of_seeds = {
                "tokens_per_s_of_seeds": [round(steady(one), 1) for one in each],
                "ttft_p95_s_of_seeds": [round(p95(one), 3) for one in each],
            }
            self.report.runs.append(row | _summary(each) | of_seeds)
        return runs

    def _capacity(self, name: str, *, linked: bool) -> float:
        """Returns the tokens per second of a system to which all conversations arrive at once."""
        return statistics.median(one.per_second for one in self._at_once(name, linked=linked))

    def _at_once(self, name: str, *, linked: bool) -> list[Run]:
        keys = {f"at once/{name}/{linked}/{seed}": seed for seed in self.sizes.few_seeds}
        if all(key in self._kept for key in keys):
            return [self._run(key) for key in keys]
        with self._serve([name], self.trace, self._link() if linked else None) as (one,):
            return [
                self._run(key, partial(measure, one, self._workload.talks(seed), _AT_ONCE))
                for key, seed in keys.items()
            ]

    def _link(self) -> Link:
        runs = self._at_once(OURS, linked=False)
        counts = runs[0].counts
        page_bytes = round(counts["stored_bytes"] / counts["stored_pages"])
        pages = mean_pages(self._workload.talks(self.sizes.seeds[0]), PAGE)
        iteration = statistics.median(run.gap["p50"] for run in runs)
        return Link(iteration, pages, page_bytes, self._layers)

    def _run(self, key: str, measure: Callable[[], Run] | None = None) -> Run:
        if measure is None:
            return Run(**self._kept.find(key, dict))
        return Run(**self._kept.find(key, lambda: asdict(measure())))

    @contextmanager
    def _serve(
        self,
        names: Sequence[str],
        policy: Mapping[str, Any],
        link: Link | None,
        host: str | None = None,
    ) -> Iterator[list[server.Server]]:
        if not names:
            yield []
            return
        running = systems(names, self.sizes.pool, host or self.sizes.host, policy, link)
        said = self._workload.talks(self.sizes.seeds[0])
        with server.serve(
            running, self._workload.model, self._logs, deadline=_START_DEADLINE_S
        ) as servers:
            for one in servers:
                warm_up(one, said)
            yield servers


def trace(pattern: str, every: int) -> dict[str, Any]:
    """Returns the policy that draws priorities by a pattern, every so many iterations."""
    return {"trace": pattern, "quantum": every}


def ratio(runs: Runs, above: str, below: str, of: Callable[[Run], float]) -> float:
    """Returns the median over the seeds of the ratio between two systems."""
    pairs = zip(runs[above], runs[below], strict=True)
    return statistics.median(of(one) / of(other) for one, other in pairs)


def of_all(runs: Runs, above: str, below: str, rank: float) -> float:
    """Returns the ratio of a TTFT percentile between two systems, over the turns of all seeds.

    One seed alone has too few turns.
    """
    values = [
        float(np.percentile([ttft for one in runs[name] for ttft in one.ttft], rank))
        for name in (above, below)
    ]
    return values[0] / values[1]


def p95(run: Run) -> float:
    """Returns the 95th percentile of the TTFT, in seconds."""
    return run.percentile(95)


def _p50(run: Run) -> float:
    return run.percentile(50)


def throughput(run: Run) -> float:
    """Returns the generated tokens per second of the whole run."""
    return run.throughput


def steady(run: Run) -> float:
    """Returns the generated tokens per second before the batch drains."""
    return run.per_second


def speed(run: Run) -> float:
    """Returns the inverse of a TTFT percentile, so that more is better."""
    return 1 / run.percentile(95)


def stored(run: Run) -> float:
    """Returns the number of pages that were copied from the device."""
    return sum(run.counts.get(name, 0) for name in ("stored_pages", "tails", "copied_again"))


def recomputed(run: Run) -> float:
    """Returns the share of the computed tokens that were computed again."""
    return run.counts.get("recomputed_tokens", 0) / run.computed


def _summary(runs: Sequence[Run]) -> dict[str, float]:
    """Returns medians over the seeds, and values over the turns of all seeds."""
    found: dict[str, Callable[[Run], float]] = {
        "ttft_p50_s": _p50,
        "ttft_p95_s": p95,
        "tokens_per_s": throughput,
        "tbt_p99_ms": lambda one: 1e3 * one.gap["p99"],
        "tbt_p99.9_ms": lambda one: 1e3 * one.gap["p99.9"],
        "swapped_out": lambda one: one.counts.get("swapped_out", 0),
        "pages_out_each": lambda one: stored(one) / max(one.counts.get("swapped_out", 0), 1),
        "recomputed_share": recomputed,
    }
    medians = {name: statistics.median(map(of, runs)) for name, of in found.items()}
    ttft = [seconds for one in runs for seconds in one.ttft]
    p99 = {"ttft_p99_of_all_s": float(np.percentile(ttft, 99))}
    return {"seeds": len(runs), "turns": len(ttft), **p99, **medians}
