"""Linking chunks against computing them: how soon the first token comes, how many prompts are
answered, and how far the answers are off.

Prompts are documents of real questions and one of the questions, the chunks of each in several
orders, so that prompts share no prefix: once the documents as they are, once merged into chunks of
512 tokens. Contexts are created before anything is timed, as an application would, primed by
documents that are in none of the prompts. ``stock`` is SGLang with its radix cache. Speed and load
are measured in the precision that the machine is fastest in, answers are compared in float32. A
whole run takes hours; one that was broken off goes on with the prompt that it was at, if it is
given the same ``--out`` (on the same machine: all systems are asked each prompt one after the
other), and measures load anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_ext.bench.chunks.accuracy import PARTS as ACCURACY
from sgl_ext.bench.chunks.accuracy import Accuracy, AccuracySizes
from sgl_ext.bench.chunks.linked import DEFAULT, EXACT, PAGE, systems
from sgl_ext.bench.chunks.load import Load, LoadSizes
from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.chunks.speed import Speed, SpeedSizes
from sgl_ext.bench.harness import server
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.models import SMOLLM2, prepare

_METHODS = (
    "naive", "lego-0", "lego-2", "lego-8", "lego-16", "lego-32", "blend-5", "blend-15",
    "primed", "primed+head-8", DEFAULT,
)  # fmt: skip
_COMPARED = ("lego-16", "blend-15", DEFAULT)
_COMPARED_POOL = 80_000
"""Tokens, where prompts come one after the other and none comes again."""


@dataclass(frozen=True)
class _Sizes:
    pool: int
    """Tokens."""
    speed: SpeedSizes
    load: LoadSizes
    accuracy: AccuracySizes


_QUICK = _Sizes(
    80_000,
    SpeedSizes({1024: 2, 4096: 2}, orders=2, methods=_COMPARED, as_they_are=1),
    LoadSizes(requests=6, rounds=1, methods=_COMPARED),
    AccuracySizes(_COMPARED, _COMPARED, as_they_are=4),
)
_WHOLE = _Sizes(
    300_000,
    SpeedSizes({1024: 4, 2048: 4, 4096: 4, 7168: 3}, orders=3, methods=_METHODS, as_they_are=4),
    LoadSizes(requests=16, rounds=3, methods=_COMPARED),
    AccuracySizes(
        _COMPARED,
        _METHODS,
        as_they_are=200,
        by_all=10,
        merged=10,
        merged_length=2048,
        needles=60,
        needle_length=2048,
    ),
)


PARTS = ("speed", "load", *ACCURACY)


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    sizes = _QUICK if quick else _WHOLE
    from transformers import AutoConfig, AutoTokenizer

    model = prepare(SMOLLM2)
    template = Template(AutoTokenizer.from_pretrained(model))
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    config = {"quick": quick, "page": PAGE, "compared": EXACT, **asdict(sizes)}
    report = Report("chunks", config)
    # Too small a pool ends the run, and decides nothing else; load is measured anew.
    deciding = {name: value for name, value in config.items() if name not in ("pool", "load")}
    partial = Partial(out, "chunks", deciding, quick=quick)
    if {"speed", "load"} & {*parts}:
        with server.serve(systems(sizes.pool), model, out / "logs") as (stock, ours):
            if "speed" in parts:
                Speed(stock, ours, template, sizes.speed, partial).report(report)
            if "load" in parts:
                Load(stock, ours, template, sizes.load).report(report)
    if {*ACCURACY} & {*parts}:
        exact, logs = systems(_COMPARED_POOL, *EXACT), out / "logs" / "compared"
        with server.serve(exact, model, logs) as (stock, ours):
            Accuracy(stock, ours, template, sizes.accuracy, layers, partial).report(report, parts)
    if {*parts} == {*PARTS}:
        partial.forget()
    return report
