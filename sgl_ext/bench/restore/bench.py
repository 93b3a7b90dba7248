"""Restoration of long contexts from a slow tier: recomputing, loading, Cake, CacheFlow, and ours.

The tier is an SSD that is slowed down until loading a context of 4,096 tokens takes half as long
as computing it, as long, or twice as long. Every system has its own copy of the contexts' KV on the
SSD, and nothing in device or host memory when a request arrives. The part ``host`` restores
contexts from host memory, behind a link that is slowed down likewise; ``ssd-layers`` compares
restoration by tokens and by layers from the SSD. Contexts of the part ``long`` are longer than
those that the model is trained for; their times count and their answers do not.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import rotated
from sgl_ext.bench.restore.batches import Batches, BatchSizes
from sgl_ext.bench.restore.contexts import Context, mixed_lengths, of_lengths
from sgl_ext.bench.restore.layers import report_layers, report_ssd_layers
from sgl_ext.bench.restore.served_stages import report_served_stages
from sgl_ext.bench.restore.servers import (
    CAKE,
    LOAD,
    LONGEST,
    OURS,
    PAGE,
    RECOMPUTE,
    RECOMPUTE_IN_CHUNKS,
    fill,
    loaded,
    systems,
)
from sgl_ext.bench.restore.stages import report_stages
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.progress import steps
from sgl_ext.serving import server
from sgl_ext.serving.http import forget

_REFERENCE = 4096
"""Tokens of the context that takes ``ratio`` times as long to load as to compute."""
_STAGE_ROUNDS = 4


@dataclass(frozen=True)
class _Sizes:
    lengths: Sequence[int]
    """Lengths of the contexts that are restored one at a time, in tokens."""
    each: int
    """Number of contexts of each length."""
    rounds: int
    """Rounds in which each of these contexts is requested."""
    ratios: Sequence[float]
    """Ratios of the time of loading to the time of computing."""
    mixed: int
    """Number of contexts of mixed lengths that batches are drawn from."""
    longest: int
    """Maximum length of these contexts, in tokens."""
    batches: BatchSizes
    by_layers: Sequence[int]
    """Lengths of the contexts that are restored from host memory, in tokens."""
    ssd_layers: Sequence[int]
    """Lengths of the contexts that are restored from an SSD by tokens and by layers, in tokens."""
    ssd_each: int
    """Number of contexts of each of these lengths."""
    by_stages: Sequence[int]
    """Lengths of the contexts that two stages of a pipeline restore four times each, in tokens."""
    served_stages: Sequence[int]
    """Lengths of the contexts that servers of two stages restore, in tokens."""
    three_stages: Sequence[int]
    """Lengths of the contexts that servers of three stages restore, in tokens."""
    long: Sequence[int]
    """Lengths of the contexts of the part ``long``, in tokens."""
    pool: int
    """Device pool, in tokens."""


_QUICK = _Sizes(
    (1024, _REFERENCE),
    1,
    1,
    (1.0,),
    12,
    3072,
    BatchSizes({8: 2}, {8: 2}, (0,), 12, (0,)),
    (512,),
    (512,),
    2,
    (2048,),
    (1024,),
    (1024,),
    (2048,),
    32_000,
)
_WHOLE = _Sizes(
    (1024, 2048, _REFERENCE, 7168),
    2,
    1,
    (0.5, 1.0, 2.0),
    24,
    8192,
    BatchSizes({2: 6, 4: 4, 8: 4, 16: 2}, {8: 1}, (0, 1, 2), 48, (0, 1)),
    (128, 256, 512, 1024),
    (256, 512, 1024, 2048),
    8,
    (2048, _REFERENCE),
    (2048, _REFERENCE),
    (2048,),
    (16_384, 32_768),
    56_000,
)


PARTS = (
    "alone", "batches", "arrivals", "host", "ssd-layers", "stages", "served-stages", "three-stages",
    "long",
)  # fmt: skip


def run(*, quick: bool, out: Path, parts: Sequence[str] = PARTS) -> Report:
    sizes = _QUICK if quick else _WHOLE
    model = prepare(SMOLLM2)
    report = Report("restore", {"quick": quick, "reference": _REFERENCE, **asdict(sizes)})
    if {"alone", "batches", "arrivals", "host", "ssd-layers"} & {*parts}:
        _slow_tiers(report, model, out, sizes, parts)
    if "stages" in parts:
        report_stages(report, model, sizes.by_stages, _STAGE_ROUNDS)
    for part, stages, lengths in (
        ("served-stages", 2, sizes.served_stages),
        ("three-stages", 3, sizes.three_stages),
    ):
        if part in parts:
            each, rounds = (1, 1) if quick else (3, 2)
            report_served_stages(report, model, out, stages, lengths, each, rounds)
    if "long" in parts:
        _long(report, model, out, sizes)
    return report


def _slow_tiers(
    report: Report, model: Path, out: Path, sizes: _Sizes, parts: Sequence[str]
) -> None:
    lengths = [*sizes.lengths] * sizes.each if "alone" in parts else [_REFERENCE] * sizes.each
    count = max(
        sizes.mixed if "batches" in parts else 0,
        sizes.batches.arrivals if "arrivals" in parts else 0,
    )
    contexts = of_lengths(model, lengths + mixed_lengths(count, 256, sizes.longest, seed=0))
    alone, mixed = contexts[: len(lengths)], contexts[len(lengths) :]
    with tempfile.TemporaryDirectory(dir=out, prefix="restore-") as scratch:
        filled = Path(scratch) / "filled"
        logs = out / "logs"
        computing = fill(filled, contexts, model, sizes.pool, logs)
        reference = [each for each in alone if each.length == _REFERENCE]
        seconds = statistics.median(computing[each.name] for each in reference)
        stored = sum(file.stat().st_size for file in filled.rglob("pages"))
        token_bytes = stored / sum(each.length // PAGE * PAGE for each in contexts)
        full = _REFERENCE * token_bytes / seconds
        for ratio in sizes.ratios:
            alike = ratio == 1.0
            if not {"alone", *(("batches", "arrivals") if alike else ())} & {*parts}:
                continue
            names = [CAKE, OURS]
            if {"alone", "batches"} & {*parts}:
                names += [RECOMPUTE, RECOMPUTE_IN_CHUNKS, LOAD, *([LONGEST] if alike else [])]
            rate = round(full / ratio)
            staging = round(sizes.pool / 2 * token_bytes)  # six servers share the machine's memory
            running = systems(names, filled, Path(scratch), sizes.pool, f"{staging}B", rate)
            with server.serve(running, model, logs / f"{ratio:g}") as servers:
                if "alone" in parts:
                    _alone(report, servers, alone, sizes.rounds, ratio)
                batches = Batches(servers, mixed, sizes.batches, rate)
                if alike and "batches" in parts:
                    batches.report(report)
                    report.write(out / "partial")  # kept if what follows fails
                if alike and "arrivals" in parts:
                    batches.report_arrivals(report)
            report.write(out / "partial")
        if "host" in parts:
            report_layers(report, model, logs, sizes.by_layers, round(full))
        if "ssd-layers" in parts:
            report_ssd_layers(report, model, out, sizes.ssd_layers, sizes.ssd_each, round(full))


def _long(report: Report, model: Path, out: Path, sizes: _Sizes) -> None:
    """Measures long contexts one at a time, at the rate at which the reference is loaded as fast as
    it is computed."""
    positions = json.dumps({"max_position_embeddings": max(sizes.long) + 1024})
    more = ("--json-model-override-args", positions)
    contexts = of_lengths(model, [_REFERENCE, *sizes.long])
    reference, *longer = contexts
    with tempfile.TemporaryDirectory(dir=out, prefix="restore-") as scratch:
        filled, logs = Path(scratch) / "filled", out / "logs" / "long"
        computing = fill(filled, contexts, model, sizes.pool, logs, *more)
        stored = sum(file.stat().st_size for file in filled.rglob("pages"))
        token_bytes = stored / sum(each.length // PAGE * PAGE for each in contexts)
        rate = round(_REFERENCE * token_bytes / computing[reference.name])
        names = [CAKE, OURS, RECOMPUTE, LOAD]
        # A prefix is loaded only as far as staging holds it.
        staging = f"{round((max(sizes.long) + _REFERENCE) * token_bytes)}B"
        running = systems(names, filled, Path(scratch), sizes.pool, staging, rate, *more)
        with server.serve(running, model, logs) as servers:
            _alone(report, servers, longer, 1, 1.0, first=reference)


def _alone(
    report: Report,
    servers: Sequence[server.Server],
    contexts: Sequence[Context],
    rounds: int,
    ratio: float,
    first: Context | None = None,
) -> None:
    """Measures one request at a time, and adds runs and figures.

    Args:
        first: context of the first request of each server, which is slow and does not count; None
            for the longest one.
    """
    from sgl_ext.bench.harness.load_generator import Request
    from sgl_ext.bench.harness.load_generator import run as send

    names = [each.system.name for each in servers]
    ttft: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    first = first or max(contexts, key=lambda each: each.length)
    for turn, context in enumerate(steps([first, *[*contexts] * rounds], "prompts alone")):
        for one in rotated(servers, turn):
            forget(one.url)
            (timing,) = send(one.url, [Request(context.tokens, 1)])
            if one.system.name == LOAD:
                loaded(context, timing)
            if turn:
                ttft[one.system.name].setdefault(context.length, []).append(timing.ttft)
    for length in ttft[OURS]:
        medians = {name: statistics.median(ttft[name][length]) for name in names}
        compute = min(medians[name] for name in medians if name in (RECOMPUTE, RECOMPUTE_IN_CHUNKS))
        load = medians[LOAD]
        bound = compute * load / (compute + load)
        for name in names:
            report.runs.append(
                {
                    "what": f"alone, loading takes {ratio:g} of computing",
                    "system": name,
                    "tokens": length,
                    "samples": len(ttft[name][length]),
                    "over_bound": medians[name] / bound,
                    "speedup_vs_best_single": min(compute, load) / medians[name],
                }
                | summary(ttft[name][length], "ttft_ms", 1e3)
            )
        over, speedup = medians[OURS] / bound, min(compute, load) / medians[OURS]
        if length >= _REFERENCE and ratio == 1.0:
            report.figures[f"ratio_to_bound_{length}"] = over
            report.figures[f"speedup_vs_best_single_{length}"] = speedup
            _note(report, "ratio_to_bound", over, worse=max)
            _note(report, "speedup_vs_best_single", speedup, worse=min)
        if ratio != 1.0:
            _note(report, "speedup_vs_best_single_at_other_rates", speedup, worse=min)


def _note(report: Report, name: str, value: float, worse: Callable[[float, float], float]) -> None:
    """Sets a figure to the worst value so far."""
    report.figures[name] = worse(report.figures.get(name, value), value)
