"""Conversations that do not fit the device: recomputation, and swapping as in vLLM and FastSwitch.

ShareGPT conversations arrive as a Poisson process, and priorities change all the time, so that
running requests are preempted. Systems are compared in two settings: with host memory as it is,
where a copy takes little time compared with an iteration on a CPU, and behind a link that is slowed
down until swapping a request takes as much of an iteration as on the paper's machine (FastSwitch).

Loads are relative to the throughput that our system would have if swapping cost nothing. This is
measured with host memory as it is and all conversations arriving at once.

The part ``speeds`` serves the model's first layers only: it has many runs, of which only the ratios
of times count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.harness.sampling import paired_ratio
from sgl_ext.bench.swap.exact import report_exact
from sgl_ext.bench.swap.runs import Run, Workload, mean_answer, mean_pages, measure, warm_up
from sgl_ext.bench.swap.systems import (
    BESIDE_TIER,
    DEFINITIONS,
    HICACHE,
    OURS,
    OURS_AGAIN,
    PAGE,
    PER_PAGE,
    RECOMPUTE,
    STOCK,
    WITHOUT,
    WITHOUT_REUSE,
    Link,
    systems,
)
from sgl_ext.models import SMOLLM2, prepare, shortened
from sgl_ext.serving import server

_AT_ONCE = 1000.0
"""Arrival rate at which all conversations arrive at once, in conversations per second."""
_HEAVY = 1.3
_LEVELS = (0, 100)
_START_DEADLINE_S = 900.0
"""Deadline for the start of all servers side by side, in seconds."""
_SMALL = ("link", "without", "traces", "static")
_LARGE = ("native",)
_SHORT = ("speeds",)
PARTS = (*_SMALL, *_LARGE, *_SHORT, "exact")
_SHORT_LAYERS = 6


@dataclass(frozen=True)
class _Sizes:
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
    speeds: Sequence[float] = ()
    """Times of a copy on the links of the part ``speeds``, relative to the link of the others; 0
    for host memory as it is."""


_QUICK = _Sizes(6, 512, 2.0, 1024, "768MiB", 50, (0,), (0,), (0, 1))
_SMALL_SIZES = _Sizes(
    48, 320, 2.0, 3072, "768MiB", 50, (*range(5),), (0, 1, 2), (0, 0.03, 0.3, 1, 3, 10)
)
# Each draw of the priorities costs a recomputation of as much as the device holds. Against stock
# SGLang the device therefore holds more, and more conversations share it.
_LARGE_SIZES = _Sizes(96, 320, 2.0, 8192, "2GiB", 25, (*range(5),), (0, 1, 2))
_EXACT = (6, 300)
"""Conversations of the part ``exact``, in a quick run and in a whole one."""

Runs = Mapping[str, Sequence[Run]]
"""Runs of each system, in the order of the seeds."""


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    small, large = (_QUICK, _QUICK) if quick else (_SMALL_SIZES, _LARGE_SIZES)
    model = prepare(SMOLLM2)
    config = {"quick": quick, "page": PAGE}
    report = Report("swap", config | {"small": asdict(small), "large": asdict(large)})
    complete = []
    for name, of, sizes, layers in (
        ("small", _SMALL, small, None),
        ("large", _LARGE, large, None),
        ("short", _SHORT, small, _SHORT_LAYERS),
    ):
        if chosen := [part for part in parts if part in of]:
            served = model if layers is None else shortened(SMOLLM2, layers)
            bench = _Bench(report, served, sizes, out, name, quick=quick)
            for part in chosen:
                getattr(bench, part)()
            if {*of} <= {*parts}:
                complete.append(bench)
    if "exact" in parts:
        report_exact(report, model, out / "logs", _EXACT[not quick], small.pool)
    for bench in complete:
        bench.forget()
    return report


class _Bench:
    def __init__(
        self, report: Report, model: Path, sizes: _Sizes, out: Path, name: str, *, quick: bool
    ) -> None:
        from transformers import AutoConfig

        self._report, self._sizes = report, sizes
        self._layers: int = AutoConfig.from_pretrained(model).num_hidden_layers
        self._workload = Workload(model, sizes.conversations, sizes.longest, sizes.pause)
        self._logs = out / "logs" / "swap"
        # Only sizes that measurements depend on: few_seeds, because arrival rates follow from the
        # capacity with them. Further seeds may be added to an interrupted run.
        decisive = ("conversations", "longest", "pause", "pool", "host", "quantum", "few_seeds")
        kept = {name: value for name, value in asdict(sizes).items() if name in decisive}
        self._kept = Partial(out, f"swap-{name}", kept | DEFINITIONS, quick=quick)
        self._trace = _trace("random", sizes.quantum)

    def forget(self) -> None:
        """Deletes the results that were kept for an interrupted run."""
        self._kept.forget()

    def link(self) -> None:
        """Measures systems behind the link, at a load that none of them sustains."""
        names = (RECOMPUTE, PER_PAGE, OURS)
        runs = self._offer("link", names, self._trace, _HEAVY, linked=True)
        figures, ours = self._report.figures, runs[OURS]
        figures["p95_ttft_speedup_vs_sync_swap"] = _ratio(runs, PER_PAGE, OURS, _p95)
        figures["p99_ttft_speedup_vs_sync_swap"] = _of_all(runs, PER_PAGE, OURS, 99)
        figures["throughput_ratio"] = _ratio(runs, OURS, PER_PAGE, _throughput)
        figures["tbt_p99.9_ratio_vs_sync_swap"] = _ratio(
            runs, OURS, PER_PAGE, lambda one: one.gap["p99.9"]
        )
        figures["call_stack_share"] = max(one.counts["busy_seconds"] / one.seconds for one in ours)
        figures["recomputed_tokens_share"] = max(_recomputed(one) for one in ours)
        figures["recomputed_tokens_share_of_recomputing"] = statistics.median(
            _recomputed(one) for one in runs[RECOMPUTE]
        )

    def speeds(self) -> None:
        """Compares our system with the better of two others, and with itself, on several links."""
        names, figures = (BESIDE_TIER, PER_PAGE, OURS, OURS_AGAIN), self._report.figures
        for times in self._sizes.speeds:
            runs = self._offer(
                f"speeds {times:g}", names, self._trace, _HEAVY, linked=times > 0, times=times,
                few=True,
            )  # fmt: skip
            for name, of in (("throughput", _steady), ("p95_ttft_speed", _speed)):
                ours, again, *others = (
                    [of(one) for one in runs[each]]
                    for each in (OURS, OURS_AGAIN, BESIDE_TIER, PER_PAGE)
                )
                found = paired_ratio(ours, np.max(others, axis=0))
                same = paired_ratio(ours, again)
                at = f"{name}_at_{times:g}"
                figures[at] = found.median
                figures[f"{at}_low"] = found.low
                figures[f"{at}_same_half_width"] = max(same.high - 1, 1 - same.low)

    def without(self) -> None:
        """Measures our system without each of its parts, as in :meth:`link`."""
        names = (OURS, *WITHOUT)
        runs = self._offer("without", names, self._trace, _HEAVY, linked=True, few=True)
        self._report.figures["swap_out_blocks_ratio"] = _ratio(runs, OURS, WITHOUT_REUSE, _stored)

    def traces(self) -> None:
        """Measures the other priority traces, behind the link."""
        for pattern, every in (("random", 25), ("markov", 50), ("markov", 25)):
            runs = self._offer(
                f"{pattern} {every}", (PER_PAGE, OURS), _trace(pattern, every), _HEAVY, linked=True,
                few=True,
            )  # fmt: skip
            at, figures = f"{pattern}_{every}", self._report.figures
            figures[f"p95_ttft_speedup_{at}"] = _ratio(runs, PER_PAGE, OURS, _p95)
            figures[f"p99_ttft_speedup_{at}"] = _of_all(runs, PER_PAGE, OURS, 99)
            figures[f"throughput_ratio_{at}"] = _ratio(runs, OURS, PER_PAGE, _throughput)

    def native(self) -> None:
        """Measures systems with host memory as it is."""
        # Stock SGLang has no priority traces, so the comparison is with its recomputation, for
        # requests that are preempted by our policy.
        names, figures = (RECOMPUTE, PER_PAGE, OURS), self._report.figures
        runs = self._offer("native", names, self._trace, _HEAVY, linked=False)
        for name, of in ((RECOMPUTE, "stock"), (PER_PAGE, "sync_swap")):
            figures[f"native_p95_ttft_speedup_vs_{of}"] = _ratio(runs, name, OURS, _p95)
            figures[f"native_throughput_ratio_vs_{of}"] = _ratio(runs, OURS, name, _throughput)

    def static(self) -> None:
        """Measures two fixed priorities, which stock SGLang supports, too."""
        names = (STOCK, HICACHE, PER_PAGE, OURS)
        policy = {"policy": "static"}
        runs = self._offer("static", names, policy, 0.9, linked=False, levels=_LEVELS)
        figures = self._report.figures
        for name, of in ((STOCK, "stock"), (HICACHE, "hicache")):
            figures[f"static_p95_ttft_speedup_vs_{of}"] = _ratio(runs, name, OURS, _p95)
            figures[f"static_throughput_ratio_vs_{of}"] = _ratio(runs, OURS, name, _throughput)

    def _offer(
        self,
        what: str,
        names: Sequence[str],
        policy: Mapping[str, Any],
        load: float,
        *,
        linked: bool,
        levels: tuple[int | None, ...] = (None,),
        few: bool = False,
        times: float = 1.0,
    ) -> Runs:
        """Sends the same conversations at the same times to each system, for each seed.

        Args:
            what: name of the runs.
            names: systems that are compared.
            policy: ``policy`` or ``trace``, and ``quantum``, of all systems but the stock ones.
            load: arrival rate, relative to the throughput if swapping cost nothing.
            linked: True to put the systems behind the link.
            levels: priorities, of which each conversation draws one.
            few: True to use only ``few_seeds``.
            times: time of a copy relative to the link of the other parts.
        """
        seeds = self._sizes.few_seeds if few else self._sizes.seeds
        talks = [self._workload.talks(seed, levels) for seed in seeds]
        ideal = self._capacity(OURS, linked=False)
        link = replace(self._link(), times=times) if linked else None
        names_of = {name: [f"{what}/{load:.3f}/{name}/{seed}" for seed in seeds] for name in names}
        missing = [name for name in names if any(key not in self._kept for key in names_of[name])]
        with self._serve(missing, policy, link) as servers:
            for place, said in enumerate(talks):
                rate = load * ideal / mean_answer(said)
                for at in range(len(servers)):
                    one = servers[(place + at) % len(servers)]
                    key = names_of[one.system.name][place]
                    self._run(key, partial(measure, one, said, rate))
        runs = {name: [self._run(key) for key in keys] for name, keys in names_of.items()}
        for name, each in runs.items():
            link_of = "emulated" if linked else "as it is"
            row = {"what": what, "system": name, "load": load, "link": link_of, **policy}
            of_seeds = {
                "tokens_per_s_of_seeds": [round(_steady(one), 1) for one in each],
                "ttft_p95_s_of_seeds": [round(_p95(one), 3) for one in each],
            }
            self._report.runs.append(row | _summary(each) | of_seeds)
        return runs

    def _capacity(self, name: str, *, linked: bool) -> float:
        """Returns the tokens per second of a system to which all conversations arrive at once."""
        return statistics.median(one.per_second for one in self._at_once(name, linked=linked))

    def _at_once(self, name: str, *, linked: bool) -> list[Run]:
        keys = {f"at once/{name}/{linked}/{seed}": seed for seed in self._sizes.few_seeds}
        if all(key in self._kept for key in keys):
            return [self._run(key) for key in keys]
        with self._serve([name], self._trace, self._link() if linked else None) as (one,):
            return [
                self._run(key, partial(measure, one, self._workload.talks(seed), _AT_ONCE))
                for key, seed in keys.items()
            ]

    def _link(self) -> Link:
        runs = self._at_once(OURS, linked=False)
        stored = runs[0].counts
        page_bytes = round(stored["stored_bytes"] / stored["stored_pages"])
        pages = mean_pages(self._workload.talks(self._sizes.seeds[0]), PAGE)
        iteration = statistics.median(run.gap["p50"] for run in runs)
        return Link(iteration, pages, page_bytes, self._layers)

    def _run(self, key: str, measure: Callable[[], Run] | None = None) -> Run:
        if measure is None:
            return Run(**self._kept.find(key, dict))
        return Run(**self._kept.find(key, lambda: asdict(measure())))

    @contextmanager
    def _serve(
        self, names: Sequence[str], policy: Mapping[str, Any], link: Link | None
    ) -> Iterator[list[server.Server]]:
        if not names:
            yield []
            return
        running = systems(names, self._sizes.pool, self._sizes.host, policy, link)
        said = self._workload.talks(self._sizes.seeds[0])
        with server.serve(
            running, self._workload.model, self._logs, deadline=_START_DEADLINE_S
        ) as servers:
            for one in servers:
                warm_up(one, said)
            yield servers


def _trace(pattern: str, every: int) -> dict[str, Any]:
    return {"trace": pattern, "quantum": every}


def _ratio(runs: Runs, above: str, below: str, of: Callable[[Run], float]) -> float:
    """Returns the median over the seeds of the ratio between two systems."""
    pairs = zip(runs[above], runs[below], strict=True)
    return statistics.median(of(one) / of(other) for one, other in pairs)


def _of_all(runs: Runs, above: str, below: str, rank: float) -> float:
    """Returns the ratio of a TTFT percentile between two systems, over the turns of all seeds.

    One seed alone has too few turns.
    """
    values = [
        float(np.percentile([ttft for one in runs[name] for ttft in one.ttft], rank))
        for name in (above, below)
    ]
    return values[0] / values[1]


def _p95(run: Run) -> float:
    return run.percentile(95)


def _p50(run: Run) -> float:
    return run.percentile(50)


def _throughput(run: Run) -> float:
    return run.throughput


def _steady(run: Run) -> float:
    """Returns the generated tokens per second before the batch drains."""
    return run.per_second


def _speed(run: Run) -> float:
    """Returns the inverse of a TTFT percentile, so that more is better."""
    return 1 / run.percentile(95)


def _stored(run: Run) -> float:
    """Returns the number of pages that were copied from the device."""
    return sum(run.counts.get(name, 0) for name in ("stored_pages", "tails", "copied_again"))


def _recomputed(run: Run) -> float:
    return run.counts.get("recomputed_tokens", 0) / run.computed


def _summary(runs: Sequence[Run]) -> dict[str, float]:
    """Returns medians over the seeds, and values over the turns of all seeds."""
    found: dict[str, Callable[[Run], float]] = {
        "ttft_p50_s": _p50,
        "ttft_p95_s": _p95,
        "tokens_per_s": _throughput,
        "tbt_p99_ms": lambda one: 1e3 * one.gap["p99"],
        "tbt_p99.9_ms": lambda one: 1e3 * one.gap["p99.9"],
        "swapped_out": lambda one: one.counts.get("swapped_out", 0),
        "pages_out_each": lambda one: _stored(one) / max(one.counts.get("swapped_out", 0), 1),
        "recomputed_share": _recomputed,
    }
    medians = {name: statistics.median(map(of, runs)) for name, of in found.items()}
    ttft = [seconds for one in runs for seconds in one.ttft]
    p99 = {"ttft_p99_of_all_s": float(np.percentile(ttft, 99))}
    return {"seeds": len(runs), "turns": len(ttft), **p99, **medians}
