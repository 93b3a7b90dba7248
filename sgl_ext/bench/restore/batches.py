"""Restoration of several contexts: batches that arrive at once, and Poisson arrivals."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import rotated
from sgl_ext.bench.restore.contexts import Context
from sgl_ext.bench.restore.servers import (
    CAKE,
    LOAD,
    LONGEST,
    OURS,
    RECOMPUTE,
    RECOMPUTE_IN_CHUNKS,
    loaded,
)
from sgl_ext.progress import steps
from sgl_ext.serving import server
from sgl_ext.serving.http import forget, live

if TYPE_CHECKING:
    from sgl_ext.bench.harness.load_generator import Timing

_LOAD = 0.7
"""Arrival rate of contexts, as a share of Cake's maximum throughput."""
_AT_MOST = 24
"""Contexts that are requested at once to measure Cake's maximum throughput.

With so many, resources that are idle at the end, when one context is left, count for little.
"""

_WARM = 3
"""Contexts that every server restores before its batches are measured."""


@dataclass(frozen=True)
class BatchSizes:
    """Numbers of batches and arrivals that are measured."""

    batches: Mapping[int, int]
    """Batches for each seed, by the number of requests of a batch."""
    by_all: Mapping[int, int]
    """Batches of these that all systems restore; the others are restored by Cake and ours only."""
    seeds: Sequence[int]
    arrivals: int
    """Contexts that are requested one after another, for each of ``arrival_seeds``.

    With so many, it does not matter that no request waits at first.
    """
    arrival_seeds: Sequence[int]


@dataclass
class _Measured:
    ttft: list[float] = field(default_factory=list)
    """TTFT of every request, in seconds."""
    means: dict[str, float] = field(default_factory=dict)
    """Mean TTFT of every batch, in seconds, by the name of the batch."""
    seconds: float = 0.0
    """Seconds from the start of a batch to the end of its last request, summed over batches."""
    computing: float = 0.0
    """Seconds of prefill forwards, including their waits."""
    loading: float = 0.0
    """Seconds that the loaded bytes take at the rate of the slow device."""

    def busy(self) -> dict[str, float]:
        """Returns shares of the time; empty for systems that do not report them."""
        if not self.computing:
            return {}
        return {"computing": self.computing / self.seconds, "loading": self.loading / self.seconds}


class Batches:
    """Measurement of batches and arrivals on all servers.

    Args:
        contexts: contexts that batches are drawn from, at least as many as any batch has.
        rate: rate of the slow device, in bytes per second.
    """

    def __init__(
        self,
        servers: Sequence[server.Server],
        contexts: Sequence[Context],
        sizes: BatchSizes,
        rate: float,
    ) -> None:
        self._rate = rate
        self._servers = servers
        self._contexts = contexts
        self._sizes = sizes

    def report(self, report: Report) -> None:
        """Adds the runs and figures of contexts that are requested at once."""
        self._warm(self._servers, _WARM)
        for size in self._sizes.batches:
            measured = self._of_size(size)
            for name, one in measured.items():
                if not one.means:
                    continue
                report.runs.append(
                    {
                        "what": f"batches of {size}",
                        "system": name,
                        "batches": len(one.means),
                        "mean_ttft_ms": 1e3 * statistics.mean(one.ttft),
                    }
                    | one.busy()
                    | summary(one.ttft, "ttft_ms", 1e3)
                )
            self._figures(report, size, measured)

    def _figures(self, report: Report, size: int, measured: Mapping[str, _Measured]) -> None:
        figures, at = report.figures, f"b{size}"
        ours, cake = measured[OURS], measured[CAKE]
        figures[f"mean_ttft_speedup_vs_cake_{at}"] = _speedup(ours, cake)
        gains = [cake.means[name] / mean for name, mean in ours.means.items()]
        figures[f"least_ttft_speedup_vs_cake_{at}"] = min(gains)
        figures[f"p99_ttft_ratio_vs_cake_{at}"] = _p99(ours) / _p99(cake)
        if not self._sizes.by_all.get(size):
            return
        figures[f"mean_ttft_speedup_vs_best_single_{at}"] = min(
            _speedup(ours, measured[name]) for name in (RECOMPUTE, RECOMPUTE_IN_CHUNKS, LOAD)
        )
        figures[f"longest_mean_ttft_speedup_vs_cake_{at}"] = _speedup(measured[LONGEST], cake)
        busy = ours.busy()
        figures["compute_busy"], figures["io_busy"] = busy["computing"], busy["loading"]

    def _of_size(self, size: int) -> dict[str, _Measured]:
        measured = {each.system.name: _Measured() for each in self._servers}
        turn = 0
        for seed in steps(self._sizes.seeds, "seeds of batches"):
            choose = random.Random(f"batches/{size}/{seed}")  # noqa: S311
            for number in range(self._sizes.batches[size]):
                batch = choose.sample([*self._contexts], size)
                of_all = number < self._sizes.by_all.get(size, 0)
                for one in rotated(self._servers, turn):
                    if of_all or one.system.name in (CAKE, OURS):
                        kept = measured[one.system.name]
                        self._measure(one, batch, [0.0] * size, kept, f"{seed}/{number}")
                turn += 1
        return measured

    def _measure(
        self,
        one: server.Server,
        batch: Sequence[Context],
        arrivals: Sequence[float],
        measured: _Measured,
        name: str = "",
    ) -> None:
        from sgl_ext.bench.harness.load_generator import Request, run

        forget(one.url)
        before = _busy(one.url)
        begin = time.monotonic()
        timings: list[Timing] = run(
            one.url,
            [Request(each.tokens, 1, at=at) for each, at in zip(batch, arrivals, strict=True)],
        )
        if one.system.name == LOAD:
            for context, timing in zip(batch, timings, strict=True):
                loaded(context, timing)
        measured.seconds += time.monotonic() - begin
        after = _busy(one.url)
        measured.computing += after[0] - before[0]
        measured.loading += (after[1] - before[1]) / self._rate
        measured.ttft += [timing.ttft for timing in timings]
        measured.means[name] = statistics.mean(timing.ttft for timing in timings)

    def report_arrivals(self, report: Report) -> None:
        """Adds the runs and figures of Poisson arrivals."""
        most = self._most()
        measured = {each.system.name: _Measured() for each in self._servers}
        for turn, seed in enumerate(self._sizes.arrival_seeds):
            choose = random.Random(f"arrivals/{seed}")  # noqa: S311
            batch = choose.sample([*self._contexts], self._sizes.arrivals)
            arrivals = np.cumsum([choose.expovariate(_LOAD * most) for _ in batch]).tolist()
            for one in rotated(self._servers, turn):
                if one.system.name in (CAKE, OURS):
                    self._measure(one, batch, arrivals, measured[one.system.name])
        for name in (CAKE, OURS):
            ttft = measured[name].ttft
            report.runs.append(
                {
                    "what": f"arrivals at {_LOAD:g} of Cake's throughput",
                    "system": name,
                    "samples": len(ttft),
                    "a_second": _LOAD * most,
                    "mean_ttft_ms": 1e3 * statistics.mean(ttft),
                }
                | summary(ttft, "ttft_ms", 1e3)
            )
        ours, cake = measured[OURS].ttft, measured[CAKE].ttft
        report.figures["arrivals_mean_ttft_speedup_vs_cake"] = statistics.mean(
            cake
        ) / statistics.mean(ours)
        report.figures["arrivals_p99_ttft_ratio_vs_cake"] = float(
            np.percentile(ours, 99) / np.percentile(cake, 99)
        )

    def _warm(self, servers: Sequence[server.Server], count: int) -> None:
        """Restores ``count`` contexts, so that the servers learn their costs."""
        warm = self._contexts[:count]
        for each in servers:
            self._measure(each, warm, [0.0] * len(warm), _Measured())

    def _most(self) -> float:
        """Returns the maximum throughput of Cake, in contexts per second."""
        (cake,) = (each for each in self._servers if each.system.name == CAKE)
        self._warm([each for each in self._servers if each.system.name in (CAKE, OURS)], _AT_MOST)
        measured = _Measured()
        for seed in steps(self._sizes.arrival_seeds, "seeds of arrivals"):
            choose = random.Random(f"most/{seed}")  # noqa: S311
            batch = choose.sample([*self._contexts], min(_AT_MOST, len(self._contexts)))
            self._measure(cake, batch, [0.0] * len(batch), measured)
        return len(measured.ttft) / measured.seconds


def _speedup(one: _Measured, other: _Measured) -> float:
    """Returns by how much the mean TTFT of ``one`` is lower, over the batches of both."""
    both = [*one.means.keys() & other.means.keys()]
    return sum(other.means[name] for name in both) / sum(one.means[name] for name in both)


def _p99(one: _Measured) -> float:
    return float(np.percentile(one.ttft, 99))


def _busy(url: str) -> tuple[float, float]:
    """Returns seconds of prefill and bytes loaded from SSD of a server; zeros for a stock one."""
    found = live(url)
    if not found:
        return 0.0, 0.0
    return found["prefill_seconds"], found["tiers"]["ssd"]["loaded_bytes"]
