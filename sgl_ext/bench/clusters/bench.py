"""Benchmark of ``clusters``: attention mass of selections, divergence of answers, time per token.

A server records keys and queries of real texts. The part ``mass`` calculates from them the share
of the attention that a selection covers, and the part ``heads`` that of a selection for each KV
head. In the parts ``answers``, ``continuing``, ``joined`` and ``serving``, servers follow stored
contexts; in the part ``storing``, they store one. The part ``against`` compares a stored context
with dense attention, and the part ``selections`` one that is stored with other blocks, whose
answers the part ``texts`` compares over several texts. The parts ``long``, ``devices`` and
``entries`` vary the length of the context, the number of devices and the bytes of an entry. The
part ``larger`` measures the time per token of a larger model, and the part ``quality`` has answers
to questions over stored contexts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial as partial_of
from pathlib import Path
from typing import Any

from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.clusters.against import report_against, report_long
from sgl_ext.bench.clusters.answers import report_answers
from sgl_ext.bench.clusters.continuing import report_continuing
from sgl_ext.bench.clusters.heads import report_heads
from sgl_ext.bench.clusters.joined import report_joined
from sgl_ext.bench.clusters.mass import report_mass
from sgl_ext.bench.clusters.quality import QualitySizes, report_quality
from sgl_ext.bench.clusters.samples import Observed, code, essay, samples, stored_system
from sgl_ext.bench.clusters.scale import report_devices, report_entries
from sgl_ext.bench.clusters.selections import report_selections, report_texts
from sgl_ext.bench.clusters.serving import report_larger, report_serving
from sgl_ext.bench.clusters.storing import report_storing
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.models import QWEN_CODER, SMOLLM2, prepare, with_kv_heads
from sgl_ext.serving import server

PARTS = (
    "mass", "heads", "answers", "continuing", "joined", "serving", "larger", "storing", "against",
    "selections", "texts", "long", "devices", "entries", "quality",
)  # fmt: skip
_DEVICES = 4
_BY_HEAD = 2
"""Number of contexts of which each KV head has a selection of its own."""
_CONTINUED = 2
"""Number of contexts that are stored in turns."""
_JOINED = 4
"""Number of contexts that are stored in parts."""


@dataclass(frozen=True)
class _Sizes:
    contexts: Sequence[int]
    """Length of each context, in tokens."""
    unseen: int
    """Number of tokens that follow each context."""
    pool: int
    shares: Sequence[float]
    rounds: int
    stored: int
    """Length of the context whose storage is measured, in tokens."""
    stores: int
    """Number of times that it is stored."""
    batches: Sequence[int]
    """Numbers of requests at once of the parts ``against`` and ``selections``."""
    long: Sequence[int]
    """Lengths of the contexts of the part ``long``, in tokens."""
    at_once: Sequence[int]
    """Numbers of requests at once of the parts ``long``, ``devices`` and ``entries``."""
    devices: Sequence[int]
    """Numbers of devices of the part ``devices``."""
    entries: int
    """Length of the context of the part ``entries``, in tokens."""
    kv_heads: Sequence[int]
    """Numbers of KV heads of the part ``entries``."""
    quality: QualitySizes


_QUICK = _Sizes(
    (2048,), 100, 8192, (0.1,), 2, 2000, 1, (1, 4), (2048,), (1, 4), (1, 2), 1024, (3, 9),
    QualitySizes(2, (1024,), 3),
)  # fmt: skip
_WHOLE = _Sizes(
    (4096, 5120, 6144, 6656, 4608), 301, 20_000, (0.1, 0.2, 1.0), 10, 7000, 3, (1, 4, 8),
    (8192, 16_384, 32_768), (1, 8, 16), (1, 2, 4, 8), 2048, (3, 9, 18, 72),
    QualitySizes(24, (2048, 4096), 48),
)  # fmt: skip


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    sizes = _QUICK if quick else _WHOLE
    model = prepare(SMOLLM2)
    config = {"quick": quick, "model": model.name, **asdict(sizes)}
    report = Report("clusters", config)
    partial = Partial(out, "clusters", config, quick=quick)
    read = samples(model, sizes.contexts, sizes.unseen)
    observed: list[Observed] = []
    if {"mass", "heads", "answers", "continuing", "joined", "quality"} & {*parts}:
        with _server(model, sizes.pool, out) as running:
            if "mass" in parts or "heads" in parts:
                few = read if "mass" in parts else read[:_BY_HEAD]
                observed = [Observed.by(running.url, each) for each in few]
            if "answers" in parts:
                report_answers(report, running.url, read, sizes.shares, partial)
            if "continuing" in parts:
                report_continuing(report, running.url, read[:_CONTINUED], partial)
            if "joined" in parts:
                report_joined(report, running.url, read[:_JOINED], partial)
            if "quality" in parts:
                report_quality(
                    report, running.url, Template.of_model(model), sizes.quality, partial
                )
    if "serving" in parts:
        _find(
            report, partial, "serving",
            lambda found: report_serving(found, model, read[-1], sizes.pool, sizes.rounds, out),
        )  # fmt: skip
    if "larger" in parts:
        larger = prepare(SMOLLM2 if quick else QWEN_CODER)
        (sample,) = samples(larger, sizes.contexts[-1:], sizes.unseen)
        _find(
            report, partial, "larger",
            lambda found: report_larger(found, larger, sample, sizes.pool, sizes.rounds, out),
        )  # fmt: skip
    if "storing" in parts:
        (longest,) = samples(model, (sizes.stored,), sizes.unseen)
        _find(
            report, partial, "storing",
            lambda found: report_storing(found, model, longest, sizes.stores, out),
        )  # fmt: skip
    if "against" in parts:
        _find(
            report, partial, "against",
            lambda found: report_against(
                found, model, read[-2:][0], sizes.batches, -(-sizes.rounds // 2), out
            ),
        )  # fmt: skip
    if "selections" in parts:
        _find(
            report, partial, "selections",
            lambda found: report_selections(
                found, model, read[0], sizes.batches, sizes.pool, -(-sizes.rounds // 4), out
            ),
        )  # fmt: skip
    if "texts" in parts:
        several = [*read, code(model, sizes.contexts[0], sizes.unseen)]
        report_texts(report, model, several, sizes.pool, out, partial)
    rounds = -(-sizes.rounds // 4)
    if "long" in parts:
        for length in sizes.long:
            sample = essay(model, length, sizes.unseen)
            measure = partial_of(
                report_long,
                model=model,
                sample=sample,
                batches=sizes.at_once,
                rounds=rounds,
                out=out,
            )
            _find(report, partial, f"long/{length}", measure)
    if "devices" in parts:
        measure = partial_of(
            report_devices, model=model, sample=read[0], devices=sizes.devices,
            batches=sizes.at_once, rounds=rounds, out=out,
        )  # fmt: skip
        _find(report, partial, "devices", measure)
    if "entries" in parts:
        (short,) = samples(model, (sizes.entries,), sizes.unseen)
        for heads in sizes.kv_heads:
            measure = partial_of(
                report_entries, model=with_kv_heads(SMOLLM2, heads), kv_heads=heads,
                sample=short, batches=sizes.at_once, rounds=rounds, out=out,
            )  # fmt: skip
            _find(report, partial, f"entries/{heads}", measure)
    if "mass" in parts:
        report_mass(report, observed, partial)
    if "heads" in parts:
        report_heads(report, observed[:_BY_HEAD], partial)
    if {*parts} == {*PARTS}:
        partial.forget()
    return report


def _find(report: Report, partial: Partial, name: str, measure: Callable[[Report], None]) -> None:
    """Measures a part and adds its results, or adds those of an interrupted run."""

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
        section = {"largest": 1.0, "open": 4, "hot": "16MiB"}
        system = stored_system("clusters", Path(scratch), _DEVICES, pool, section)
        with server.serve([system], model, out / "logs") as (running,):
            yield running
