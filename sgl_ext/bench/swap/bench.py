"""Conversations that do not fit the device: recomputation, and swapping as in vLLM and FastSwitch.

ShareGPT conversations arrive as a Poisson process, and priorities change all the time, so that
running requests are preempted. Systems are compared in two settings: with host memory as it is,
where a copy takes little time compared with an iteration on a CPU, and behind a link that is slowed
down until swapping a request takes as much of an iteration as on the paper's machine (FastSwitch).

The parts ``speeds``, ``sweeps``, ``efficiency`` and ``long`` serve the model's first layers only:
they have many or long runs, of which only the ratios of times count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.harness.sampling import paired_ratio
from sgl_ext.bench.swap.exact import report_exact
from sgl_ext.bench.swap.offers import (
    HEAVY,
    Offers,
    Sizes,
    of_all,
    p95,
    ratio,
    recomputed,
    speed,
    steady,
    throughput,
)
from sgl_ext.bench.swap.runs import EFFICIENCY_RANKS, Run
from sgl_ext.bench.swap.sweeps import report_sweeps
from sgl_ext.bench.swap.systems import (
    BESIDE_TIER,
    HICACHE,
    OURS,
    OURS_AGAIN,
    PAGE,
    PER_PAGE,
    RECOMPUTE,
    STOCK,
    WITHOUT_ASYNC,
)
from sgl_ext.models import SMOLLM2, prepare, shortened

_LEVELS = (0, 100)
_SHORT_LAYERS = 6
_QUICK = Sizes(6, 512, 2.0, 1024, "768MiB", 50, (0,), (0,), {0: (0,), 1: (0,)})
_SEEDS_OF_SPEEDS = dict.fromkeys((0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10), (0, 1, 2)) | {
    3: (*range(10),)  # with few seeds it was uncertain whether swapping is slower there
}
_SMALL_SIZES = Sizes(48, 320, 2.0, 3072, "768MiB", 50, (*range(5),), (0, 1, 2), _SEEDS_OF_SPEEDS)
# Each draw of the priorities costs a recomputation of as much as the device holds. Against stock
# SGLang the device therefore holds more, and more conversations share it.
_LARGE_SIZES = Sizes(96, 320, 2.0, 8192, "2GiB", 25, (*range(5),), (0, 1, 2))
_LONG_SIZES = Sizes(32, 2048, 2.0, 8192, "768MiB", 50, (0, 1), (0, 1))
_EXACT = (6, 300)
"""Conversations of the part ``exact``, in a quick run and in a whole one."""


def _link(offers: Offers) -> None:
    """Measures systems behind the link, at a load that none of them sustains."""
    names = (RECOMPUTE, BESIDE_TIER, PER_PAGE, OURS)
    runs = offers.offer("link", names, offers.trace, HEAVY, linked=True)
    figures, ours = offers.report.figures, runs[OURS]
    for name, of in ((PER_PAGE, "sync_swap"), (BESIDE_TIER, "beside_tier")):
        figures[f"p95_ttft_speedup_vs_{of}"] = ratio(runs, name, OURS, p95)
        figures[f"p99_ttft_speedup_vs_{of}"] = of_all(runs, name, OURS, 99)
        figures[f"throughput_ratio_vs_{of}"] = ratio(runs, OURS, name, throughput)
        figures[f"steady_throughput_ratio_vs_{of}"] = ratio(runs, OURS, name, steady)
        figures[f"tbt_p99.9_speedup_vs_{of}"] = ratio(
            runs, name, OURS, lambda one: one.gap["p99.9"]
        )
    figures["call_stack_share"] = max(one.counts["busy_seconds"] / one.seconds for one in ours)
    figures["recomputed_tokens_share"] = max(recomputed(one) for one in ours)
    figures["recomputed_tokens_share_of_recomputing"] = statistics.median(
        recomputed(one) for one in runs[RECOMPUTE]
    )


def _speeds(offers: Offers) -> None:
    """Compares our system with the better of two others, and with itself, on several links."""
    names, figures = (BESIDE_TIER, PER_PAGE, OURS, OURS_AGAIN), offers.report.figures
    for times, seeds in offers.sizes.speeds.items():
        runs = offers.offer(
            f"speeds {times:g}", names, offers.trace, HEAVY, linked=times > 0, times=times,
            seeds=seeds,
        )  # fmt: skip
        for name, of in (("throughput", steady), ("p95_ttft_speed", speed)):
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


def _long(offers: Offers) -> None:
    """Compares systems behind the link with conversations that are several times as long."""
    runs = offers.offer("long", (PER_PAGE, OURS), offers.trace, HEAVY, linked=True)
    figures = offers.report.figures
    figures["long_throughput_ratio_vs_sync_swap"] = ratio(runs, OURS, PER_PAGE, throughput)
    figures["long_p95_ttft_speedup_vs_sync_swap"] = ratio(runs, PER_PAGE, OURS, p95)
    for rank in (99, 99.9):
        figures[f"long_p{rank:g}_ttft_speedup_vs_sync_swap"] = of_all(runs, PER_PAGE, OURS, rank)
    figures["long_tbt_p99.9_speedup_vs_sync_swap"] = ratio(
        runs, PER_PAGE, OURS, lambda one: one.gap["p99.9"]
    )


def _efficiency(offers: Offers) -> None:
    """Compares the tokens per second of intervals of 5 iterations (FastSwitch Figure 12)."""
    names, seeds = (PER_PAGE, WITHOUT_ASYNC, OURS), offers.sizes.few_seeds
    runs = offers.offer("efficiency", names, offers.trace, HEAVY, linked=True, seeds=seeds)
    for rank in (f"p{rank:g}" for rank in EFFICIENCY_RANKS):

        def of(one: Run, rank: str = rank) -> float:
            return one.efficiency[rank]

        for name, other in ((PER_PAGE, "sync_swap"), (WITHOUT_ASYNC, "waiting")):
            offers.report.figures[f"efficiency_{rank}_vs_{other}"] = ratio(runs, OURS, name, of)
    for name, each in runs.items():
        medians = {
            rank: statistics.median(one.efficiency[rank] for one in each)
            for rank in each[0].efficiency
        }
        offers.report.runs.append({"what": "efficiency, quantiles", "system": name, **medians})


def _native(offers: Offers) -> None:
    """Measures systems with host memory as it is."""
    # Stock SGLang has no priority traces, so the comparison is with its recomputation, for
    # requests that are preempted by our policy.
    names, figures = (RECOMPUTE, PER_PAGE, OURS), offers.report.figures
    runs = offers.offer("native", names, offers.trace, HEAVY, linked=False)
    for name, of in ((RECOMPUTE, "stock"), (PER_PAGE, "sync_swap")):
        figures[f"native_p95_ttft_speedup_vs_{of}"] = ratio(runs, name, OURS, p95)
        figures[f"native_throughput_ratio_vs_{of}"] = ratio(runs, OURS, name, throughput)


def _static(offers: Offers) -> None:
    """Measures two fixed priorities, which stock SGLang supports, too."""
    names = (STOCK, HICACHE, PER_PAGE, OURS)
    runs = offers.offer("static", names, {"policy": "static"}, 0.9, linked=False, levels=_LEVELS)
    figures = offers.report.figures
    for name, of in ((STOCK, "stock"), (HICACHE, "hicache")):
        figures[f"static_p95_ttft_speedup_vs_{of}"] = ratio(runs, name, OURS, p95)
        figures[f"static_throughput_ratio_vs_{of}"] = ratio(runs, OURS, name, throughput)


_Part = Callable[[Offers], None]
_SMALL: Mapping[str, _Part] = {"link": _link, "static": _static}
_LARGE: Mapping[str, _Part] = {"native": _native}
_SHORT: Mapping[str, _Part] = {
    "speeds": _speeds,
    "sweeps": report_sweeps,
    "efficiency": _efficiency,
}
_LONG: Mapping[str, _Part] = {"long": _long}
PARTS = (*_SMALL, *_LARGE, *_SHORT, *_LONG, "exact")


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    small, large = (_QUICK, _QUICK) if quick else (_SMALL_SIZES, _LARGE_SIZES)
    model = prepare(SMOLLM2)
    config = {"quick": quick, "page": PAGE}
    long = _QUICK if quick else _LONG_SIZES
    of_parts = {"small": asdict(small), "large": asdict(large), "long": asdict(long)}
    report = Report("swap", config | of_parts)
    complete = []
    for name, of, sizes, layers in (
        ("small", _SMALL, small, None),
        ("large", _LARGE, large, None),
        ("short", _SHORT, small, _SHORT_LAYERS),
        ("long", _LONG, long, _SHORT_LAYERS),
    ):
        if chosen := [measure for part, measure in of.items() if part in parts]:
            served = model if layers is None else shortened(SMOLLM2, layers)
            offers = Offers(report, served, sizes, out, name, quick=quick)
            for measure in chosen:
                measure(offers)
            if {*of} <= {*parts}:
                complete.append(offers)
    if "exact" in parts:
        report_exact(report, model, out / "logs", _EXACT[not quick], small.pool)
    for offers in complete:
        offers.forget()
    return report
