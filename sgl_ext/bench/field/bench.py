"""Standard workloads on stock SGLang, HiCache, ``tiers``, and ``tiers`` with ``restore``.

``shared-prefix`` is SGLang's ``bench_serving`` with its generated shared prefixes, ``multiturn``
has the load of HiCache's ``bench_multiturn``, and ``hit-rate`` sweeps the share of a prompt that
was sent before. ``ruler`` compares the accuracy of linked chunks with that of stock SGLang on tasks
like RULER's. The servers start once, side by side, and measurements alternate between them.
With ``--dataset``, SGLang's benchmark sends a data set of your own instead, such as a trace of
Mooncake or of agents, or LongBench v2.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.field.dataset import report_dataset
from sgl_ext.bench.field.hit_rate import HitRateSizes, report_hit_rate
from sgl_ext.bench.field.multiturn import MultiturnSizes, report_multiturn
from sgl_ext.bench.field.ruler import METHODS, RulerSizes, report_ruler
from sgl_ext.bench.field.shared_prefix import SharedPrefixSizes, report_shared_prefix
from sgl_ext.bench.field.systems import OTHERS, RESTORE, TIERS, linking
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together.systems import PAGE, STOCK, Memory, scratch
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.progress import say
from sgl_ext.serving import server
from sgl_ext.serving.http import generate

_START_DEADLINE_S = 900.0
_DATASET = Memory(pool=8192, host=32_768)
"""Memory of the servers that get a data set: a prompt may have all of SmolLM2's context."""
_RULER = "ruler"
_START_MINUTES = 0.35
"""Estimated minutes of the start of one server beside others, on two cores."""


@dataclass(frozen=True)
class _Sizes:
    systems: Sequence[str]
    """Names of the servers whose times are compared."""
    memory: Memory
    """Memory of these servers: less than their prompts need on the device, enough in the host."""
    shared_prefix: SharedPrefixSizes
    multiturn: MultiturnSizes
    hit_rate: HitRateSizes
    ruler: RulerSizes


_QUICK = _Sizes(
    (*OTHERS, TIERS),
    Memory(pool=2048, host=8192),
    SharedPrefixSizes(8, 2, system=384, question=64, answer=4, parallel=2, runs=1),
    MultiturnSizes(clients=8, rounds=2, length=320, answer=8, parallel=2, runs=1),
    HitRateSizes((0, 50, 100), prefixes=5, length=512),
    RulerSizes(2, 768, METHODS[-1:]),
)
_WHOLE = _Sizes(
    (*OTHERS, TIERS, RESTORE),
    Memory(pool=4096, host=16_384),
    SharedPrefixSizes(12, 4, system=1024, question=128, answer=16, parallel=2, runs=2),
    MultiturnSizes(clients=8, rounds=4, length=512, answer=16, parallel=4, runs=2),
    HitRateSizes((0, 25, 50, 75, 100), prefixes=8, length=1024),
    RulerSizes(6, 1536, METHODS),
)


class _Minutes(NamedTuple):
    """Estimated minutes of a part on two cores, without the start of servers."""

    quick: float
    whole: float


_MINUTES: Mapping[str, _Minutes] = {
    "shared-prefix": _Minutes(0.5, 3),
    "multiturn": _Minutes(0.5, 3),
    "hit-rate": _Minutes(0.4, 2.5),
    _RULER: _Minutes(0.7, 4.5),
}
PARTS = tuple(_MINUTES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument(
        "--dataset", default="", metavar="ARGUMENTS",
        help="arguments of sglang.benchmark.serving, such as '--dataset-name mooncake "
        "--dataset-path FILE --num-prompts 50'; no other part is measured",
    )  # fmt: skip


def minutes(options: argparse.Namespace) -> float:
    """Returns the estimated minutes of a run on two cores, without a data set of one's own."""
    parts = options.part or PARTS
    started = len(_systems(_QUICK if options.quick else _WHOLE, parts)) + (_RULER in parts)
    own = sum(_MINUTES[part].quick if options.quick else _MINUTES[part].whole for part in parts)
    return _START_MINUTES * started + own


def run(
    *, quick: bool, out: Path, options: argparse.Namespace, parts: Sequence[str] = PARTS
) -> Report:
    sizes = _QUICK if quick else _WHOLE
    model, logs = prepare(SMOLLM2), out / "logs" / "field"
    config = {"quick": quick, "model": model.name, "page": PAGE, **asdict(sizes)}
    memory = sizes.memory
    if dataset := _words(options.dataset):
        memory, parts = _DATASET, ()
        config |= {"dataset": options.dataset, "memory": asdict(memory)}
    report = Report("field-dataset" if dataset else "field", config)
    with scratch(out) as places:
        systems = [memory.system(name, places) for name in _systems(sizes, parts)]
        if _RULER in parts:
            systems.append(linking())
        with server.serve(systems, model, logs, deadline=_START_DEADLINE_S) as servers:
            timed = servers[: len(servers) - (_RULER in parts)]
            _warm_up(timed)
            if dataset:
                report_dataset(report, timed, model, logs, dataset)
            for part in (each for each in PARTS if each in parts):
                say(f"field {part}")
                if part == _RULER:
                    report_ruler(
                        report, timed[0], servers[-1], Template.of_model(model), sizes.ruler
                    )
                else:
                    _measure(part, report, timed, model, logs, sizes)
                report.write(out / "partial")  # kept if a later part fails
    return report


def _words(arguments: str) -> list[str]:
    """Returns the arguments of a command line.

    Raises:
        ExtError: a quotation is not closed.
    """
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise ExtError(f"cannot read --dataset {arguments!r}: {error}; close it") from None


def _systems(sizes: _Sizes, parts: Sequence[str]) -> Sequence[str]:
    """Returns the names of the servers that these parts need, besides that for linked chunks."""
    return (STOCK,) if [*parts] == [_RULER] else sizes.systems


def _warm_up(servers: Sequence[server.Server]) -> None:
    """Sends the first requests of each process, which are slow."""
    for each in servers:
        for number in (1, 2):
            generate(each.url, [1000 + number] * 512, 4)


def _measure(
    part: str,
    report: Report,
    servers: Sequence[server.Server],
    model: Path,
    logs: Path,
    sizes: _Sizes,
) -> None:
    if part == "shared-prefix":
        report_shared_prefix(report, servers, model, logs, sizes.shared_prefix)
    elif part == "multiturn":
        report_multiturn(report, servers, model, sizes.multiturn)
    else:
        report_hit_rate(report, servers, sizes.hit_rate)
