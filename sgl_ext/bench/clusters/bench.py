"""Decoding over contexts on SSDs: what is chosen, what it costs to read, and what comes of it.

A server reads contexts of real text and what follows them, and its records are what is looked at
below it: how much of the attention each way of choosing finds (``mass``; of many texts together,
``large``), what reading costs on emulated SSDs (``io``), and the policies (``policies``,
``drift``). Then servers follow stored contexts (``answers``, ``serving``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_ext.bench.clusters.answers import report_answers
from sgl_ext.bench.clusters.drift import Growing
from sgl_ext.bench.clusters.io import IoSizes, report_io
from sgl_ext.bench.clusters.large import LargeSizes, report_large
from sgl_ext.bench.clusters.mass import report_mass
from sgl_ext.bench.clusters.policies import PolicySizes, report_policies
from sgl_ext.bench.clusters.samples import Observed, samples, stored_system
from sgl_ext.bench.clusters.serving import report_serving
from sgl_ext.bench.harness import server
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.models import SMOLLM2, prepare

PARTS = ("mass", "io", "policies", "drift", "answers", "serving", "large")
_BELOW = {"mass", "io", "policies"}
_DEVICES = 4


@dataclass(frozen=True)
class _Sizes:
    contexts: Sequence[int]
    """Tokens of each."""
    unseen: int
    """Tokens that follow each."""
    pool: int
    io: IoSizes
    policies: PolicySizes
    shares: Sequence[float]
    drift: tuple[int, int]
    """Tokens that are clustered, and further ones."""
    rounds: int
    large: LargeSizes


_QUICK = _Sizes(
    (2048,), 100, 8192,
    IoSizes(10, (1, 8)), PolicySizes(10, (8, 16), (2, 8)), (0.1,), (1024, 1024), 2,
    LargeSizes((4096, 16384), 4096, 32, 15),
)  # fmt: skip
_WHOLE = _Sizes(
    (4096, 5120, 6144, 6656, 4608), 301, 20_000,
    IoSizes(8, (1, 2, 4, 8)), PolicySizes(5, (8, 12, 16, 32), range(1, 9)),
    (0.1, 0.2, 1.0), (3072, 4096), 10, LargeSizes((1 << 14, 1 << 16, 1 << 18), 4096, 64, 10),
)  # fmt: skip


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    from transformers import AutoConfig

    sizes = _QUICK if quick else _WHOLE
    model = prepare(SMOLLM2)
    config = {"quick": quick, "model": model.name, **asdict(sizes)}
    config["policies"]["devices"] = [*sizes.policies.devices]
    report = Report("clusters", config)
    partial = Partial(out, "clusters", config, quick=quick)
    read = samples(model, sizes.contexts, sizes.unseen)
    observed: list[Observed] = []
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    every = range(0, layers, sizes.policies.every)
    with _server(model, sizes.pool, out) as running:
        if _BELOW & {*parts}:
            observed = [Observed.by(running.url, each) for each in read]
        if "answers" in parts:
            report_answers(report, running.url, read, sizes.shares, partial)
        if "drift" in parts:
            growing = Growing(running.url, model, *sizes.drift)
            _find(report, partial, "drift", lambda found: growing.report(found, every))
        if "large" in parts:
            some = range(0, layers, sizes.large.every)
            report_large(report, running.url, model, some, sizes.large, partial)
    if "serving" in parts:
        _find(
            report, partial, "serving",
            lambda found: report_serving(found, model, read[-1], sizes.pool, sizes.rounds, out),
        )  # fmt: skip
    if "mass" in parts:
        report_mass(report, observed, partial)
    if "policies" in parts:
        _find(
            report, partial, "policies",
            lambda found: report_policies(found, observed, sizes.policies),
        )  # fmt: skip
    if "io" in parts:
        _find(report, partial, "io", lambda found: report_io(found, observed, sizes.io, out))
    if {*parts} == {*PARTS}:
        partial.forget()
    return report


def _find(report: Report, partial: Partial, name: str, measure: Callable[[Report], None]) -> None:
    """Adds what a part finds, or has found in a run that was broken off."""

    def found() -> dict[str, Any]:
        part = Report(report.name, {})
        measure(part)
        return {"runs": part.runs, "figures": part.figures}

    kept = partial.find(name, found)
    report.runs += kept["runs"]
    report.figures |= kept["figures"]


@contextmanager
def _server(model: Path, pool: int, out: Path) -> Iterator[server.Server]:
    with tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch:
        section = {"largest": 1.0, "open": 1, "hot": "16MiB"}
        system = stored_system("clusters", Path(scratch), _DEVICES, pool, section)
        with server.serve([system], model, out / "logs") as (running,):
            yield running
