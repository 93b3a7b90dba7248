"""Tokens of servers that follow a context on SSDs, with and without reading ahead."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_ext.bench import server
from sgl_ext.bench.clusters_answers import follow, store
from sgl_ext.bench.clusters_devices import PM9A3
from sgl_ext.bench.clusters_samples import Sample
from sgl_ext.bench.report import Report, summary

_SHARE = 0.1
_SLOWER = 40
"""Times, so that reading takes as long as computing on this machine."""
_DEVICES = 4
_PROMPT, _ANSWER = 24, 64
_AHEAD = 2.0
_UNPREDICTED = 3
"""First layers, whose queries nobody can predict."""


def report_serving(
    report: Report, model: Path, sample: Sample, pool: int, rounds: int, out: Path
) -> None:
    """Adds runs and figures."""
    slow = {
        "bytes_per_second": f"{int(PM9A3.bytes_per_second / _SLOWER)}",
        "operations_per_second": PM9A3.operations_per_second / _SLOWER,
    }
    sections: dict[str, dict[str, Any]] = {
        "as it is": {},
        "slow devices": {"emulate": slow},
        "slow devices, read ahead": {"emulate": slow, "prefetch": _AHEAD},
    }
    with tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch:
        systems = [
            _system(name, Path(scratch) / str(at), section, pool)
            for at, (name, section) in enumerate(sections.items())
        ]
        with server.serve(systems, model, out / "logs") as servers:
            contexts = [store(each.url, sample.context) for each in servers]
            seconds: dict[str, list[float]] = {name: [] for name in sections}
            before: dict[str, dict[str, float]] = {}
            for at in range(rounds + 1):
                prompt = sample.unseen[at * _PROMPT :][:_PROMPT]
                for each, context in zip(servers, contexts, strict=True):
                    found = _token(each.url, prompt, context)
                    if at:  # the first one opens the context
                        seconds[each.system.name].append(found)
                    else:
                        before[each.system.name] = _spent(each, context)
            for each, context in zip(servers, contexts, strict=True):
                name = each.system.name
                _report(report, each, context, seconds[name], before[name])
    figures, ahead = report.figures, "slow devices, read ahead"
    figures["read_ahead_speedup"] = statistics.median(seconds["slow devices"]) / statistics.median(
        seconds[ahead]
    )


def _opened(one: server.Server, context: str) -> dict[str, Any]:
    found: dict[str, Any] = server.live(one.url)["clusters"]["open"][context]
    return found


def _spent(one: server.Server, context: str) -> dict[str, float]:
    found: dict[str, float] = _opened(one, context)["seconds"]
    return found


def _report(
    report: Report,
    one: server.Server,
    context: str,
    seconds: Sequence[float],
    before: dict[str, float],
) -> None:
    name = one.system.name
    found = _opened(one, context)
    spent = {what: found["seconds"][what] - before[what] for what in before}
    every = sum(seconds) * _ANSWER
    coverage = found["coverage"][_UNPREDICTED:]
    report.runs.append(
        {
            "what": "serving",
            "system": name,
            "choosing": spent["choosing"] / every,
            "fetching": spent["fetching"] / every,
            "expecting": spent["expecting"] / every,
            "coverage": statistics.mean(coverage),
            "in_memory": found["in_memory"],
            "fetched": found["fetched"] + found["expected"],
            "samples": len(seconds),
        }
        | summary(seconds, "token_ms", 1e3)
    )
    if name == "as it is":
        report.figures["retrieval_overhead_share"] = spent["choosing"] / every
    elif "ahead" in name:
        report.figures["prefetch_coverage"] = statistics.mean(coverage)


def _token(url: str, prompt: Sequence[int], context: str) -> float:
    """Seconds of a token of an answer."""
    took = []
    for count in (1, 1 + _ANSWER):
        body = {
            "input_ids": [*prompt],
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        }
        begin = time.perf_counter()
        follow(url, body, context, _SHARE)
        took.append(time.perf_counter() - begin)
    return (took[1] - took[0]) / _ANSWER


def _system(name: str, place: Path, section: dict[str, Any], pool: int) -> server.System:
    places = [place / f"device{at}" for at in range(_DEVICES)]
    for each in places:
        each.mkdir(parents=True)
    config = {"directories": [*map(str, places)], "hot": "8MiB", **section}
    arguments = (
        "--max-total-tokens", str(pool), "--mem-fraction-static", "0.95",
        "--enable-ext", "--ext-config", json.dumps({"clusters": config}),
    )  # fmt: skip
    return server.System(name, arguments)
