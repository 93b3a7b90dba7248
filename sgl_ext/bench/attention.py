"""Benchmark of the plugin's CPU attention against stock ``torch_native``: operator and TTFT.

The operator runs with SmolLM2's geometry on SGLang's pool: an extend of 16 new tokens behind a
cached context, as in the next turn of a chat, and a decode. The servers answer prompts whose first
4,096 tokens are cached and whose last 16 are not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, ratio_of_medians
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare
from sgl_ext.serving import server

_NEW = 16
_SERVED_CONTEXT = 4096
_CONTEXTS = (256, 1024, 4096, 8192)


def run(*, quick: bool, out: Path) -> Report:
    repeats = 5 if quick else 30
    report = Report("attention", {"quick": quick, "repeats": repeats, "new_tokens": _NEW})
    for context in _CONTEXTS:
        _operator(report, context, repeats)
    _served(report, repeats, out / "logs")
    return report


def _operator(report: Report, context: int, repeats: int) -> None:
    import torch

    from sgl_ext.bench.harness.attention_trial import AttentionTrial, Geometry, Row

    torch.set_grad_enabled(False)
    trial = AttentionTrial(Geometry(), [context + _NEW])
    cases = (
        ("extend", trial.extend, [Row(0, context, _NEW)], f"extend_{context}_plus_{_NEW}_speedup"),
        ("decode", trial.decode, [Row(0, context - 1, 1)], f"decode_{context}_speedup"),
    )
    for what, forward, rows, figure in cases:
        query = trial.query(rows)
        for backend in (trial.stock, trial.ours):
            forward(backend, query, rows)  # warm-up
        # A decode is short, so more repeats take little time.
        times = interleaved(
            [
                partial(_timed, forward, backend, query, rows)
                for backend in (trial.stock, trial.ours)
            ],
            repeats * (10 if what == "decode" else 1),
        )
        for system, samples in zip(("stock", "ours"), times, strict=True):
            report.runs.append(
                {"what": f"operator {what}", "context": context, "system": system}
                | summary(samples, "ms", 1e3)
            )
        report.figures[figure] = ratio_of_medians(times[0], times[1])


def _timed(forward: Callable[..., Any], backend: Any, query: Any, rows: Any, _round: int) -> float:
    start = time.perf_counter()
    forward(backend, query, rows)
    return time.perf_counter() - start


def _served(report: Report, repeats: int, logs: Path) -> None:
    from sgl_ext.bench.harness.load_generator import Request
    from sgl_ext.bench.harness.load_generator import run as send
    from sgl_ext.engine.cpu.attention import STOCK_ATTENTION

    model = prepare(SMOLLM2)
    arguments = ("--max-total-tokens", "16384")
    systems = [
        server.System("stock", arguments, {STOCK_ATTENTION: "1"}),
        server.System("ours", arguments, {STOCK_ATTENTION: "0"}),
    ]
    tokens = random.Random(0)  # noqa: S311
    prefix = [tokens.randrange(1000, 40000) for _ in range(_SERVED_CONTEXT)]

    def ttft(url: str, tail: int) -> float:
        prompt = prefix + [tokens.randrange(1000, 40000) for _ in range(tail)]
        (timing,) = send(url, [Request(prompt, 2)])
        if tail and timing.cached_tokens < _SERVED_CONTEXT:
            raise ExtError(
                f"expected {_SERVED_CONTEXT} cached tokens, found {timing.cached_tokens}"
            )
        return timing.ttft

    with server.serve(systems, model, logs) as (stock, ours):
        for system in (stock, ours):
            cold = ttft(system.url, 0)
            ttft(system.url, _NEW)  # warm-up of the measured path
            report.runs.append(
                {"what": "server cold", "context": _SERVED_CONTEXT, "system": system.system.name}
                | {"ms_p50": cold * 1e3}
            )
        times = interleaved(
            [lambda _: ttft(stock.url, _NEW), lambda _: ttft(ours.url, _NEW)], repeats
        )
    for name, samples in zip(("stock", "ours"), times, strict=True):
        report.runs.append(
            {"what": "server hot TTFT", "context": _SERVED_CONTEXT, "system": name}
            | summary(samples, "ms", 1e3)
        )
    figure = f"hot_ttft_{_SERVED_CONTEXT}_plus_{_NEW}_speedup"
    report.figures[figure] = ratio_of_medians(times[0], times[1])
