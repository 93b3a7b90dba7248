"""How the gain of swapping depends on the load, the priorities, host memory, and its parts.

All of it is behind the link that is as slow, relative to an iteration, as the paper's (FastSwitch
§4). The paper varies how frequently priorities change (Figure 8) and host memory (Figure 13), and
evaluates its parts one by one (Figures 10 to 13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sgl_ext.bench.swap.offers import (
    HEAVY,
    Offers,
    Runs,
    of_all,
    p95,
    ratio,
    speed,
    stored,
    throughput,
    trace,
)
from sgl_ext.bench.swap.runs import Run
from sgl_ext.bench.swap.systems import OURS, PER_PAGE, WITHOUT, WITHOUT_REUSE

_SEEDS = (0, 1)
_TRACES = (("random", 100), ("random", 25), ("markov", 50))
"""Patterns of the priorities, and the iterations between draws."""
_LOADS = (0.7, 1.0, HEAVY, 1.6)
_HOSTS = ("8MiB", "32MiB")
"""Capacities of host memory, less than the requests that are swapped out need."""
_OBJECTIVE = 5.0
"""Objective of a service: TTFT (p95) relative to that of the lowest load."""


def report_sweeps(offers: Offers) -> None:
    """Adds runs and figures; see the module."""
    figures = offers.report.figures
    loads = {load: _offer(offers, f"load {load:g}", (PER_PAGE, OURS), load) for load in _LOADS}
    first = min(run_p95(each) for each in loads[_LOADS[0]].values())
    reached = {
        name: highest_load(
            [(load, run_p95(runs[name])) for load, runs in loads.items()], _OBJECTIVE * first
        )
        for name in (PER_PAGE, OURS)
    }
    figures["slo_load"] = reached[OURS]
    figures["slo_load_of_sync_swap"] = reached[PER_PAGE]
    figures["slo_load_ratio"] = reached[OURS] / reached[PER_PAGE]
    for pattern, every in _TRACES:
        name = f"{pattern} {every}"
        runs = _offer(offers, name, (PER_PAGE, OURS), HEAVY, policy=trace(pattern, every))
        _compare(figures, f"{pattern}_{every}", runs, PER_PAGE)
    for host in _HOSTS:
        runs = _offer(offers, f"host {host}", (PER_PAGE, OURS), HEAVY, host=host)
        _compare(figures, f"host_{host}", runs, PER_PAGE)
    runs = _offer(offers, "without", (OURS, *WITHOUT), HEAVY)
    for at, without in enumerate(WITHOUT):
        _compare(figures, f"without_{at}", runs, without)
    figures["swap_out_blocks_ratio"] = ratio(runs, OURS, WITHOUT_REUSE, stored)


def highest_load(measured: Sequence[tuple[float, float]], objective: float) -> float:
    """Returns the load at which a latency reaches an objective, interpolated linearly.

    Args:
        measured: loads in ascending order, and the latency at each, in seconds.
        objective: in seconds.

    Returns:
        The lowest load if its latency is higher than that, and the highest load if its latency is
        lower.
    """
    before = measured[0]
    for load, latency in measured:
        if latency > objective:
            if latency == before[1]:
                return before[0]
            return before[0] + (load - before[0]) * (objective - before[1]) / (latency - before[1])
        before = load, latency
    return before[0]


def run_p95(runs: Sequence[Run]) -> float:
    """Returns the mean of the seeds' p95 of TTFT, in seconds."""
    return sum(map(p95, runs)) / len(runs)


def _offer(
    offers: Offers,
    what: str,
    names: Sequence[str],
    load: float,
    *,
    policy: Mapping[str, object] | None = None,
    host: str | None = None,
) -> Runs:
    return offers.offer(
        f"sweep, {what}", names, policy or offers.trace, load, linked=True, seeds=_SEEDS, host=host
    )


def _compare(figures: dict[str, float], at: str, runs: Runs, other: str) -> None:
    """Adds the ratios of our system to another, all of which are higher if ours is better."""
    of: Mapping[str, Callable[[Run], float]] = {"throughput": throughput, "p95_ttft_speed": speed}
    for name, each in of.items():
        figures[f"{name}_{at}"] = ratio(runs, OURS, other, each)
    figures[f"p99_ttft_speed_{at}"] = of_all(runs, other, OURS, 99)
