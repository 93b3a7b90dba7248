"""Time per token of servers that follow a stored context, with and without prefetch."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.clusters.answers import follow, store
from sgl_ext.bench.clusters.samples import Sample, stored_system
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.serving import server
from sgl_ext.serving.http import live

AS_IT_IS, SLOW, AHEAD = "as it is", "slow devices", "slow devices, read ahead"
_SHARE = 0.1
PM9A3_BYTES, PM9A3_OPERATIONS = 6.9e9, 1.1e6
"""Published bytes and operations per second of a Samsung PM9A3."""
_SLOWER = 40
"""Factor by which the emulated SSD is slower, so that reading takes as long as computing on two
cores."""
_DEVICES = 4
_PROMPT, _ANSWER = 24, 64
_EMULATED = {
    "bytes_per_second": int(PM9A3_BYTES / _SLOWER),
    "operations_per_second": PM9A3_OPERATIONS / _SLOWER,
}
_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    AS_IT_IS: {},
    SLOW: {"emulate": _EMULATED},
    AHEAD: {"emulate": _EMULATED, "prefetch": 2.0},
}
"""Options of each server's section."""
_UNPREDICTED = 3
"""Number of first layers, whose queries cannot be predicted."""


def report_serving(
    report: Report, model: Path, sample: Sample, pool: int, rounds: int, out: Path
) -> None:
    """Measures servers without emulation, with a slow SSD, and with prefetch; adds their figures.

    Args:
        pool: tokens that the KV pool of a server holds.
        rounds: number of measured answers of each server.
    """
    measured = _measure(_SECTIONS, model, sample, pool, rounds, out)
    runs = {name: one.run() for name, one in measured.items()}
    report.runs += [{"what": "serving", "system": name, **run} for name, run in runs.items()]
    as_it_is = runs[AS_IT_IS]
    report.figures["retrieval_overhead_share"] = as_it_is["select"] + as_it_is["assemble"]
    report.figures["prefetch_coverage"] = runs[AHEAD]["coverage"]
    medians = {name: statistics.median(one.tokens) for name, one in measured.items()}
    report.figures["read_ahead_speedup"] = medians[SLOW] / medians[AHEAD]


def report_larger(
    report: Report, model: Path, sample: Sample, pool: int, rounds: int, out: Path
) -> None:
    """Measures a server of a larger model without emulation; see :func:`report_serving`."""
    (one,) = _measure({AS_IT_IS: {}}, model, sample, pool, rounds, out).values()
    run = one.run()
    what = {"what": "serving, a larger model", "model": model.name, "system": AS_IT_IS}
    report.runs.append(what | run)
    report.figures["retrieval_overhead_share_of_a_larger_model"] = run["select"] + run["assemble"]


def _measure(
    sections: Mapping[str, Mapping[str, Any]],
    model: Path,
    sample: Sample,
    pool: int,
    rounds: int,
    out: Path,
) -> dict[str, _Measured]:
    """Measures servers with these options of the section, by name."""
    with tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch:
        systems = [
            stored_system(name, Path(scratch) / str(at), _DEVICES, pool, {"hot": "8MiB", **section})
            for at, (name, section) in enumerate(sections.items())
        ]
        with server.serve(systems, model, out / "logs") as servers:
            contexts = [store(each.url, sample.context) for each in servers]
            measured = {each.system.name: _Measured() for each in servers}
            for at in range(rounds + 1):
                prompt = sample.unseen[at * _PROMPT :][:_PROMPT]
                for each, context in zip(servers, contexts, strict=True):
                    # The first round opens the context and is not counted.
                    into = measured[each.system.name] if at else _Measured()
                    _answer(each.url, prompt, context, into)
    return measured


@dataclass
class _Measured:
    """Measurements of one server.

    Attributes:
        tokens: time per token of each answer, in seconds.
        seconds: time of the long answers together, in seconds.
        spent: time of the forwards' thread by activity, in seconds.
        blocks: number of blocks that were read when needed, were prefetched, or were in memory,
            int64 ``[3, layers]``.
    """

    tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0
    spent: Counter[str] = field(default_factory=Counter)
    blocks: NDArray[np.int64] | int = 0

    def run(self) -> dict[str, Any]:
        """Returns the row of a report: shares of the time, and of the wanted blocks."""
        fetched, prefetched, held = np.asarray(self.blocks)[:, _UNPREDICTED:].sum(axis=1)
        return {
            **{what: each / self.seconds for what, each in self.spent.items()},
            "in_memory": float(held / (fetched + prefetched + held)),
            # Of the blocks not in memory.
            "coverage": float(prefetched / max(prefetched + fetched, 1)),
            "samples": len(self.tokens),
        } | summary(self.tokens, "token_ms", 1e3)


BLOCKS = ("fetched", "prefetched", "in_memory")
"""Counts of blocks that a server reports of an open context, by their source."""


def _answer(url: str, prompt: Sequence[int], context: str, measured: _Measured) -> None:
    """Measures answers of one token and of many to a prompt whose KV is cached."""
    _ask(url, prompt, context, 1)
    short = _ask(url, prompt, context, 1)
    before = live(url)["clusters"]["open"][context]
    long = _ask(url, prompt, context, 1 + _ANSWER)
    after = live(url)["clusters"]["open"][context]
    measured.tokens.append((long - short) / _ANSWER)
    measured.seconds += long
    for name, seconds in after["seconds"].items():
        measured.spent[name] += seconds - before["seconds"][name]
    new, old = (np.array([found["by_layer"][name] for name in BLOCKS]) for found in (after, before))
    measured.blocks = measured.blocks + new - old


def _ask(url: str, prompt: Sequence[int], context: str, count: int) -> float:
    body = {
        "input_ids": [*prompt],
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
    }
    begin = time.perf_counter()
    follow(url, body, context, _SHARE)
    return time.perf_counter() - begin
