"""Benchmark of the CPU attention that reads K and V in place, over the block-major slab.

It is compared with a gather of the context and torch's attention over the same slab, with a plain
read of the same bytes, and with itself over SGLang's layer-major pool. The geometry is SmolLM2's
with all layers, so that K and V come from main memory. Slots lie in shuffled runs of 16, and both
pools lie in huge pages. Figures compare lower deciles of interleaved samples.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved

_CONTEXT = 4096
_LAYERS = 30
_RUN = 16
_NEW = 16

Forward = Callable[[int], Any]
"""Function that computes the attention of a layer, given by its number."""


def measure(report: Report, *, quick: bool) -> None:
    """Adds the figures and runs of the CPU attention to ``report``."""
    import torch

    from sgl_ext.bench.harness.attention_trial import AttentionTrial, Geometry, Row

    torch.set_grad_enabled(False)
    slab, pool = (
        AttentionTrial(Geometry(), [_CONTEXT], layers=_LAYERS, layout=layout, run=_RUN)
        for layout in ("block-major", "layer-major")
    )
    _decode(report, slab, pool, [Row(0, _CONTEXT - 1, 1)], 1000 if quick else 3000)
    for prefix, new, rounds in (
        (_CONTEXT - _NEW, _NEW, 100 if quick else 400),
        (0, _CONTEXT, 9 if quick else 25),
    ):
        _extend(report, slab, pool, Row(0, prefix, new), rounds)


def _decode(report: Report, slab: Any, pool: Any, rows: list[Any], rounds: int) -> None:
    query = slab.query(rows)

    def attention(trial: Any, backend: Any) -> Forward:
        attend = trial.prepared(backend, rows, decode=True)
        return lambda layer: attend(query, layer)

    systems = {
        "in place, block-major": attention(slab, slab.ours),
        "in place, layer-major": attention(pool, pool.ours),
        "gather, block-major": attention(slab, slab.gathering),
        "plain read, block-major": slab.reader(rows),
    }
    times = _measured(systems, rounds)
    row_bytes = slab.geometry.kv_heads * slab.geometry.head_dim * slab.geometry.dtype.itemsize
    moved = 2 * _CONTEXT * row_bytes
    for system, samples in times.items():
        rates = {"GB/s": moved / summary(samples, "s")["s_p50"] / 1e9}
        report.runs.append(
            {"what": "attention decode", "context": _CONTEXT, "new": 1, "system": system}
            | summary(samples, "ms", 1e3)
            | (rates if "gather" not in system else {})
        )
    ours, layer_major, gather, read = times.values()
    report.figures[f"decode_{_CONTEXT}_speedup_vs_gather"] = _ratio(gather, ours)
    report.figures["decode_fraction_of_memory_bandwidth"] = _ratio(read, ours)
    report.figures["decode_ratio_vs_layer_major"] = _ratio(ours, layer_major)


def _extend(report: Report, slab: Any, pool: Any, row: Any, rounds: int) -> None:
    query = slab.query([row])

    def attention(trial: Any, backend: Any) -> Forward:
        attend = trial.prepared(backend, [row])
        return lambda layer: attend(query, layer)

    systems = {
        "in place, block-major": attention(slab, slab.ours),
        "in place, layer-major": attention(pool, pool.ours),
        "gather, block-major": attention(slab, slab.gathering),
    }
    times = _measured(systems, rounds)
    for system, samples in times.items():
        report.runs.append(
            {
                "what": "attention extend",
                "context": row.prefix + row.new,
                "new": row.new,
                "system": system,
            }
            | summary(samples, "ms", 1e3)
        )
    ours, layer_major, gather = times.values()
    name = "prefill" if row.prefix == 0 else f"extend_{row.prefix}_plus_{row.new}"
    report.figures[f"{name}_ratio_vs_layer_major"] = _ratio(ours, layer_major)
    report.figures[f"{name}_speedup_vs_gather"] = _ratio(gather, ours)


def _ratio(samples: Sequence[float], to: Sequence[float]) -> float:
    """Returns the lower decile of ``samples`` over that of ``to``.

    At the end of a parallel region, threads wait for a thread that the kernel has preempted. They
    wait for a whole time slice, which is many times the measured time. If other processes use the
    cores, the median therefore measures the kernel's scheduler.
    """
    return _lower_decile(samples) / _lower_decile(to)


def _lower_decile(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=10, method="inclusive")[0]


def _measured(systems: dict[str, Forward], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of one layer by system; each sample takes the next layer.

    One layer is short compared with a time slice of the machine. Most samples therefore have the
    cores to themselves even if other processes use them; all layers together would not. Systems
    over the same pool are many layers apart, because otherwise one would find in the CPU cache what
    another has read.
    """

    def sampler(forward: Forward, first: int) -> Callable[[int], float]:
        layers = itertools.cycle([*range(first, _LAYERS), *range(first)])
        forward(next(layers))  # warm-up

        def sample(_round: int) -> float:
            start = time.perf_counter()
            forward(next(layers))
            return time.perf_counter() - start

        return sample

    apart = _LAYERS // len(systems)
    samplers = [sampler(forward, i * apart) for i, forward in enumerate(systems.values())]
    samples = interleaved(samplers, rounds)
    return dict(zip(systems, samples, strict=True))
