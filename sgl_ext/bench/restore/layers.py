"""Restoration from host memory behind a slow link: loading, computing, or both.

Both at once are done by layers, by tokens, or in whichever way is faster.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio_of_medians
from sgl_ext.bench.restore.contexts import NEW_TOKENS, Context, of_lengths
from sgl_ext.bench.restore.servers import RECOMPUTE, base
from sgl_ext.serving import server

_NEW = NEW_TOKENS // 2
LOAD, LAYERS, TOKENS, AUTO = "load from host", "by layers", "by tokens", "either"
_POOL = 2048
"""Device pool, in tokens: contexts of each length exceed it, and are evicted in their order."""


def report_layers(
    report: Report, model: Path, logs: Path, lengths: Sequence[int], bytes_per_second: int
) -> None:
    """Adds the runs and figures of restoration from host memory.

    Args:
        lengths: lengths of the contexts, in tokens.
        bytes_per_second: rate of loads from host memory.
    """
    host = {"capacity": "1GiB", "emulate": {"bytes_per_second": bytes_per_second}}

    def ours(name: str, how: str) -> server.System:
        config = json.dumps({"tiers": {"host": host}, "restore": {"host": how}})
        return server.System(name, (*base(_POOL), "--enable-ext", "--ext-config", config))

    systems = [
        server.System(RECOMPUTE, (*base(_POOL), "--disable-radix-cache")),
        ours(LOAD, "never"),
        ours(LAYERS, "layers"),
        ours(TOKENS, "tokens"),
        ours(AUTO, "auto"),
    ]
    counts = [length for length in lengths for _ in range(_POOL // length + 2)]
    contexts = of_lengths(model, counts)
    with server.serve(systems, model, logs / "layers") as servers:
        for length in lengths:
            same = [context for context in contexts if context.length == length]
            _of_length(report, length, _ttft(servers, same))


def _ttft(
    servers: Sequence[server.Server], contexts: Sequence[Context]
) -> Mapping[str, Sequence[float]]:
    """Returns TTFTs in seconds by system, of contexts that only host memory has by then."""
    from sgl_ext.bench.harness.load_generator import Request, run

    found: dict[str, list[float]] = {each.system.name: [] for each in servers}
    for turn in range(2):
        for number, context in enumerate(contexts):
            for at in range(len(servers)):
                one = servers[(turn + number + at) % len(servers)]
                begin = context.length + _NEW * turn  # another question each time
                tokens = [*context.heard, *context.tokens[begin : begin + _NEW]]
                (timing,) = run(one.url, [Request(tokens, 1)])
                if turn:
                    found[one.system.name].append(timing.ttft)
    return found


def _of_length(report: Report, length: int, ttft: Mapping[str, Sequence[float]]) -> None:
    medians = {name: statistics.median(each) for name, each in ttft.items()}
    compute, load = medians[RECOMPUTE], medians[LOAD]
    for name, each in ttft.items():
        report.runs.append(
            {
                "what": "host memory, behind a slow link",
                "system": name,
                "tokens": length,
                "samples": len(each),
                "over_bound": medians[name] * (compute + load) / (compute * load),
            }
            | summary(each, "ttft_ms", 1e3)
        )
    best = min(ttft[RECOMPUTE], ttft[LOAD], key=statistics.median)
    for name, figure in ((LAYERS, "layers"), (TOKENS, "tokens"), (AUTO, "auto")):
        speedup = ratio_of_medians(best, ttft[name])
        report.figures[f"{figure}_speedup_vs_best_single_{length}"] = speedup
