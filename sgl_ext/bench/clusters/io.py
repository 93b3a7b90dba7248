"""Reading what queries need from SSDs: ours and others, where all recover the same attention."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sgl_ext.bench.clusters.devices import (
    OPTANE,
    PM9A3,
    SCALE,
    Devices,
    DeviceType,
    Reads,
    devices,
)
from sgl_ext.bench.clusters.samples import Layer, Observed
from sgl_ext.bench.clusters.selectors import (
    EXACT,
    INFLLM,
    OURS,
    PQCACHE,
    SELECTORS,
    Mask,
    Selector,
)
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.clusters.placement import SECTOR, Blocks

_DEVICES = 8
_SHARE = 0.1
_OTHERS = (EXACT, INFLLM, PQCACHE)
_LARGE = 16 << 10
"""Bytes of an entry of Llama-2-7B: 32 KV heads of 128, in 16 bits."""
_TOGETHER = 16
"""Entries of an InfLLM block, which lie one behind the other."""
_PRECISION = 5e-4
"""Of a budget."""


@dataclass(frozen=True)
class IoSizes:
    """How much is read."""

    every: int
    """Every so manieth layer and query."""
    scaling: Sequence[int]
    """Numbers of devices."""


class _Case(NamedTuple):
    """A layer of a context, for some of its queries.

    Attributes:
        best: what the best of the budget get of each query's attention.
    """

    layer: Layer
    selectors: Mapping[str, Selector]
    best: float
    queries: int


def report_io(report: Report, observed: Sequence[Observed], sizes: IoSizes, out: Path) -> None:
    """Adds runs and figures."""
    geometry = observed[0].profile.geometry
    speedups: list[float] = []
    bandwidths: list[float] = []
    for regime, entry_bytes in (("entries of the model", geometry.entry_bytes), ("large", _LARGE)):
        block = Blocks.fitting(entry_bytes)
        cases = [case for each in observed for case in _cases(each, sizes.every, block)]
        budgets = _equal(cases)
        reads = {
            name: [one for case in cases for one in _reads(name, case, budgets[name], entry_bytes)]
            for name in (OURS, *_OTHERS)
        }
        for kind in (PM9A3, OPTANE):
            seconds, requests = _timed(reads, kind, _DEVICES, out)
            for name, each in reads.items():
                used = sum(one.used for one in each)
                total = sum(seconds[name])
                report.runs.append(
                    {
                        "what": f"reading, {regime}, {entry_bytes} B",
                        "devices": f"{_DEVICES} {kind.name} / {SCALE}",
                        "system": name,
                        "budget": budgets[name],
                        "requests": requests[name] / len(each),
                        "read_kib": statistics.mean(one.units.size * one.unit_bytes for one in each)
                        / 1024,
                        "used": used / sum(one.units.size * one.unit_bytes for one in each),
                        "mb_per_s": used / total / 1e6,
                    }
                    | summary(seconds[name], "ms", 1e3)
                )
            for name in _OTHERS:
                speedups.append(sum(seconds[name]) / sum(seconds[OURS]))
                useful = {of: sum(one.used for one in reads[of]) for of in (OURS, name)}
                bandwidths.append(speedups[-1] * useful[OURS] / useful[name])
        scaled = _scaling(report, reads[OURS], regime, sizes.scaling, out)
        report.figures["scaling_8_over_1" + ("" if entry_bytes < _LARGE else "_large")] = scaled
    report.figures["io_time_speedup_mean"] = statistics.mean(speedups)
    report.figures["io_time_speedup_least"] = min(speedups)
    report.figures["bandwidth_ratio_mean"] = statistics.mean(bandwidths)


def _cases(observed: Observed, every: int, block: int) -> list[_Case]:
    cases = []
    for layer in observed.layers(range(0, observed.profile.geometry.layers, every), block):
        few = layer.only(slice(None, None, every))
        budget = round(_SHARE * len(few.keys))
        best = -np.partition(-few.mass, budget - 1, axis=1)[:, :budget]
        selectors = {name: SELECTORS[name](few) for name in (OURS, *_OTHERS)}
        cases.append(_Case(few, selectors, float(best.sum()), len(few.queries)))
    return cases


def _recovered(cases: Sequence[_Case], name: str, share: float) -> float:
    """Attention to what is chosen, over that to the best of :data:`_SHARE`; mean of all layers."""
    found = []
    for case in cases:
        chosen = _select(case, name, share)
        found.append(float(case.layer.mass[chosen].sum()) / case.best)
    return statistics.mean(found)


def _select(case: _Case, name: str, share: float) -> Mask:
    return case.selectors[name].select(max(round(share * len(case.layer.keys)), 1))


def _equal(cases: Sequence[_Case]) -> dict[str, float]:
    """Of each system the share of entries with which it recovers as much as ours."""
    aim = _recovered(cases, OURS, _SHARE)
    return {OURS: _SHARE} | {name: _least(cases, name, aim) for name in _OTHERS}


def _least(cases: Sequence[_Case], name: str, aim: float) -> float:
    """The share with which a system recovers as much."""
    low, high = 0.0, 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        enough = _recovered(cases, name, middle) >= aim
        low, high = (low, middle) if enough else (middle, high)
    return high


def _reads(name: str, case: _Case, share: float, entry_bytes: int) -> list[Reads]:
    """Of each query."""
    chosen, layer = _select(case, name, share), case.layer
    together = _TOGETHER if name == INFLLM else layer.block
    unit_bytes = -(-together * entry_bytes // SECTOR) * SECTOR
    if name == OURS:
        chosen = chosen[:, layer.profile.order]
    units = -(-chosen.shape[1] // together)
    padded = np.zeros((len(chosen), units * together), bool)
    padded[:, : chosen.shape[1]] = chosen
    wanted = np.logical_or.reduce(padded.reshape(len(chosen), units, together), axis=2)
    # Layers begin on one device after the other.
    used = chosen.sum(axis=1) * entry_bytes
    return [
        Reads(np.flatnonzero(wanted[at]) + layer.number, unit_bytes, int(used[at]))
        for at in range(len(chosen))
    ]


def _timed(
    reads: Mapping[str, Sequence[Reads]], kind: DeviceType, count: int, out: Path
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each step, interleaved; and requests of each system."""
    every = [one for each in reads.values() for one in each]
    most = max(one.units.size * one.unit_bytes for one in every)
    each = max((int(one.units.max(initial=0)) // count + 1) * one.unit_bytes for one in every)
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    requests = dict.fromkeys(reads, 0)
    with (
        tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch,
        devices(Path(scratch), kind, count, each, most) as running,
    ):
        for step in zip(*reads.values(), strict=True):
            for name, one in zip(reads, step, strict=True):
                seconds[name].append(_read(running, one, requests, name))
    return seconds, requests


def _read(running: Devices, one: Reads, requests: dict[str, int], name: str) -> float:
    before = running.requests
    seconds = running.read(one)
    requests[name] += running.requests - before
    return seconds


def _scaling(
    report: Report, reads: Sequence[Reads], regime: str, counts: Sequence[int], out: Path
) -> float:
    """How many times as fast eight are as one.

    Where operations are the limit that is less than eight: blocks that follow each other on one
    device are one operation there.
    """
    total = {}
    for count in counts:
        seconds, _ = _timed({OURS: reads}, PM9A3, count, out)
        total[count] = sum(seconds[OURS])
        report.runs.append(
            {
                "what": f"scaling of ours, {regime}",
                "devices": f"{count} {PM9A3.name} / {SCALE}",
                "mb_per_s": sum(one.used for one in reads) / total[count] / 1e6,
                "speedup": total[counts[0]] / total[count],
            }
            | summary(seconds[OURS], "ms", 1e3)
        )
    return total[1] / total[8]
