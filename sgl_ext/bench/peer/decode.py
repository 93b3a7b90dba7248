"""Time per output token of masters whose request is partly in borrowed memory (SwiftCache §3.2).

All masters and a server that has all of the memory itself answer the same requests in turn. Own
blocks are allocated first, so that a longer request has a larger share in borrowed memory.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import paired_ratio, rotated
from sgl_ext.bench.peer.servers import COMMON, LAYERS, Lent, pair
from sgl_ext.bench.swap.load import Talk, Turn, run
from sgl_ext.errors import ExtError
from sgl_ext.progress import steps
from sgl_ext.serving.http import forget
from sgl_ext.serving.server import Server, System

_OWN = "own memory"
_STREAMS = ("direct", "layer", "layers")
_ANSWER = 24


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of the part ``decode``: tokens of memory and of prompts, and rounds for each."""

    local: int
    borrowed: int
    prompts: Sequence[int]
    rounds: int


def report_decode(report: Report, sizes: DecodeSizes, logs: Path) -> None:
    """Adds the time per token of each way to read borrowed memory, and its ratio to own memory."""
    own = System(
        _OWN,
        (*COMMON, "--max-total-tokens", str(sizes.local + sizes.borrowed), "--enable-ext"),
    )
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for stream in _STREAMS:
            beside = () if servers else (own,)
            setup = Lent(sizes.local, sizes.borrowed, stream)
            master, _, *others = stack.enter_context(pair(setup, logs / stream, beside=beside))
            servers |= {stream: master, **({_OWN: others[0]} if others else {})}
        for length in sizes.prompts:
            found: dict[str, list[float]] = {name: [] for name in servers}
            for server in servers.values():
                forget(server.url)
            for round_ in steps(range(sizes.rounds + 1), "rounds of answers"):
                for name, server in rotated(servers.items(), round_):
                    seconds = _per_token(server, length)
                    if round_:  # the first round computes the prompt
                        found[name].append(seconds)
            _add(report, sizes, length, found)


def _add(report: Report, sizes: DecodeSizes, length: int, found: dict[str, list[float]]) -> None:
    for name, seconds in found.items():
        buffers = {"layer": 1, "layers": 2}.get(name, 0)
        near = sizes.local - buffers * sizes.borrowed / LAYERS
        share = 0.0 if name == _OWN else max(1 - near / length, 0.0)
        ratio = paired_ratio(seconds, found[_OWN])
        report.runs.append(
            {
                "what": "decode", "stream": name, "tokens": length, "borrowed_share": share,
                "samples": len(seconds), "over_own": ratio.median, "over_own_low": ratio.low,
                "over_own_high": ratio.high,
            }
            | summary(seconds, "tpot_ms", 1e3)
        )  # fmt: skip
        if name != _OWN:
            report.figures[f"tpot_{name}_over_own_{length}"] = ratio.median


def _per_token(server: Server, length: int) -> float:
    """Returns the time per token of an answer, in seconds.

    Raises:
        ExtError: the answer is too short.
    """
    chance = random.Random(length)  # noqa: S311
    prompt = tuple(chance.randrange(1000, 40_000) for _ in range(length))
    (heard,) = run(server.url, [Talk(f"{length}", 0.0, (Turn(prompt, _ANSWER),))])
    gaps = [after - before for before, after in zip(heard.times, heard.times[1:], strict=False)]
    if len(gaps) < _ANSWER // 2:
        raise ExtError(f"{server.url} answered {len(heard.times)} of {_ANSWER} tokens")
    return statistics.median(gaps)
