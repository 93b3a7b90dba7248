"""Linking chunks against computing them: TTFT, throughput, and divergence of the answers.

A prompt consists of documents of real questions and one of the questions. Its chunks are sent in
several orders, so that a radix cache finds few shared prefixes. Chunks are either unchanged
documents, or documents merged into chunks of 512 tokens. Contexts are created before anything is
timed, as an application would do; the documents that prime them are in none of the prompts.
``stock`` is SGLang with its radix cache. Speed and load are measured in the precision that is
fastest on the machine; answers are compared in float32. The part ``lengths`` measures TTFT to four
times the positions that the model was trained on.

A whole run takes hours. An interrupted run continues with the prompt at which it stopped if it is
given the same ``--out``; it measures load and creation again. It must continue on the same machine,
because all systems are measured on a prompt one after another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_ext.bench.chunks.accuracy import PARTS as ACCURACY
from sgl_ext.bench.chunks.accuracy import Accuracy, AccuracySizes
from sgl_ext.bench.chunks.creation import Creation, CreationSizes
from sgl_ext.bench.chunks.linked import DEFAULT, EXACT, PAGE, QUERY, systems
from sgl_ext.bench.chunks.load import Load, LoadSizes
from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.chunks.speed import Speed, SpeedSizes
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving import server

_METHODS = (
    "naive", "lego-0", "lego-2", "lego-8", "lego-16", "lego-32", "blend-5", "blend-15",
    "query-5", QUERY, "primed", "primed+head-8", "primed+query-15", DEFAULT,
)  # fmt: skip
_COMPARED = ("lego-16", "blend-15", "query-5", QUERY, DEFAULT)
_COMPARED_POOL = 80_000
"""Device pool of the servers whose answers are compared, in tokens.

Prompts are sent one after another, and none is sent again.
"""


@dataclass(frozen=True)
class _Sizes:
    pool: int
    """Device pool of the server that links chunks, in tokens."""
    speed: SpeedSizes
    load: LoadSizes
    accuracy: AccuracySizes
    creation: CreationSizes
    lengths: SpeedSizes
    """Sizes of the part ``lengths``."""
    large: SpeedSizes
    """Sizes of the part ``large``, with chunks as large as in EPIC's figure 7."""


_BY_LENGTH = ("blend-15", "lego-16", DEFAULT)
_LARGE = 1024
"""Tokens of a large chunk."""
_POSITIONS = json.dumps({"max_position_embeddings": 40_960})
_QUICK = _Sizes(
    80_000,
    SpeedSizes({1024: 2, 4096: 2}, orders=2, methods=_COMPARED, as_they_are=1),
    LoadSizes(requests=6, rounds=1, methods=_COMPARED),
    AccuracySizes(_COMPARED, _COMPARED, as_they_are=10, needles=20, needle_length=2048),
    CreationSizes(1, (DEFAULT,)),
    SpeedSizes({1024: 1, 2048: 1}, orders=1, methods=_BY_LENGTH, as_they_are=0),
    SpeedSizes({2048: 1}, orders=1, methods=_BY_LENGTH, as_they_are=0, stock_most=0, chunk=_LARGE),
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
    CreationSizes(4, ("lego-16", QUERY, "primed", DEFAULT)),
    SpeedSizes({1024: 3, 4096: 2, 7936: 2, 32_768: 1}, orders=2, methods=_BY_LENGTH, as_they_are=0),
    SpeedSizes(
        {4096: 4, 7936: 4}, orders=3, methods=_BY_LENGTH, as_they_are=0, stock_most=0, chunk=_LARGE
    ),
)


PARTS = ("speed", "load", "creation", "lengths", "large", *ACCURACY)


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    sizes = _QUICK if quick else _WHOLE
    from transformers import AutoConfig

    model = prepare(SMOLLM2)
    template = Template.of_model(model)
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    config = {"quick": quick, "page": PAGE, "compared": EXACT, **asdict(sizes)}
    report = Report("chunks", config)
    # A pool that is too small ends the run; its size has no other effect. Load and creation are
    # measured again.
    again = ("pool", "load", "creation")
    deciding = {name: value for name, value in config.items() if name not in again}
    partial = Partial(out, "chunks", deciding, quick=quick)
    if {"speed", "load", "creation"} & {*parts}:
        with server.serve(systems(sizes.pool), model, out / "logs") as (stock, ours):
            if "speed" in parts:
                Speed(stock, ours, template, sizes.speed, partial).report(report)
            if "load" in parts:
                Load(stock, ours, template, sizes.load).report(report)
            if "creation" in parts:
                Creation(stock, ours, template, sizes.creation).report(report)
    if {"lengths", "large"} & {*parts}:
        longer = systems(sizes.pool, "--json-model-override-args", _POSITIONS)
        with server.serve(longer, model, out / "logs" / "lengths") as (stock, ours):
            for part, of in (("lengths", sizes.lengths), ("large", sizes.large)):
                if part in parts:
                    Speed(stock, ours, template, of, partial).report_lengths(report)
    if {*ACCURACY} & {*parts}:
        exact, logs = systems(_COMPARED_POOL, *EXACT), out / "logs" / "compared"
        with server.serve(exact, model, logs) as (stock, ours):
            Accuracy(stock, ours, template, sizes.accuracy, layers, partial).report(report, parts)
    if {*parts} == {*PARTS}:
        partial.forget()
    return report
