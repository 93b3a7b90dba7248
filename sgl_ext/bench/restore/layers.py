"""Restoration from host memory behind a slow link, or a slow SSD: loading, computing, or both.

Both at once are done by layers, by tokens, or in whichever way is faster.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio_of_medians, rotated
from sgl_ext.bench.restore.contexts import NEW_TOKENS, Context, of_lengths
from sgl_ext.bench.restore.servers import RECOMPUTE, base
from sgl_ext.progress import steps
from sgl_ext.serving import server
from sgl_ext.serving.http import forget, wait_until_stored

_NEW = NEW_TOKENS // 2
LOAD, LAYERS, TOKENS, AUTO = "load from host", "by layers", "by tokens", "either"
HICACHE = "stock with hicache"
LOAD_FROM_SSD = "load from the SSD"
_POOL = 2048
"""Device pool, in tokens: contexts of each length exceed it, and are evicted in their order."""
_SSD_POOL = 8192
"""Device pool with an SSD, in tokens; it is emptied before a request that is measured."""
_WAIT_S = 600.0


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
        config = {"tiers": {"host": host}, "restore": {"host": how}}
        return server.System(name, (*base(_POOL), *server.extension(config)))

    systems = [
        server.System(RECOMPUTE, (*base(_POOL), "--disable-radix-cache")),
        server.System(
            HICACHE,
            (*base(_POOL), "--enable-hierarchical-cache", "--hicache-size", "1"),
            {"SGLEXT_EMULATED_HICACHE": str(bytes_per_second)},
        ),
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
            ttft = _ttft(servers, same)
            _of_length(report, "host memory, behind a slow link", length, ttft, LOAD)


def report_ssd_layers(
    report: Report,
    model: Path,
    out: Path,
    lengths: Sequence[int],
    each: int,
    bytes_per_second: int,
) -> None:
    """Adds the runs and figures of restoration from an SSD, by tokens and by layers.

    Args:
        out: directory of the SSDs' files and of the logs.
        lengths: lengths of the contexts, in tokens.
        each: number of contexts of each length.
        bytes_per_second: rate of the SSD.
    """
    contexts = of_lengths(model, [length for length in lengths for _ in range(each)])
    with tempfile.TemporaryDirectory(dir=out, prefix="layers-") as scratch:

        def ours(name: str, layout: str, restore: Mapping[str, str] | None) -> server.System:
            directory = Path(scratch) / name
            directory.mkdir()
            slow = {"bytes_per_second": bytes_per_second}
            ssd = {"directories": [str(directory)], "capacity": "4GiB", "keep_after": 1}
            config: dict[str, object] = {
                "tiers": {"ssd": {**ssd, "emulate": slow}, "layout": layout, "wait": _WAIT_S}
            }
            if restore is not None:
                config["restore"] = restore
            arguments = (*base(_SSD_POOL), *server.extension(config))
            return server.System(name, arguments)

        systems = [
            server.System(RECOMPUTE, (*base(_SSD_POOL), "--disable-radix-cache")),
            ours(LOAD_FROM_SSD, "token_major", None),
            ours(TOKENS, "token_major", {}),
            ours(LAYERS, "layer_major", {"ssd": "layers"}),
            ours(AUTO, "layer_major", {}),
        ]
        with server.serve(systems, model, out / "logs" / "ssd-layers") as servers:
            _ttft(servers, contexts[:2], _onto_the_ssd)  # the first loads teach the cost models
            for length in steps(lengths, "lengths"):
                same = [context for context in contexts if context.length == length]
                ttft = _ttft(servers, same, _onto_the_ssd)
                medians = {name: statistics.median(found) for name, found in ttft.items()}
                _of_length(report, "a slow SSD", length, ttft, LOAD_FROM_SSD, "ssd_")
                for name, figure in ((LAYERS, "layers"), (AUTO, "auto")):
                    ratio = medians[TOKENS] / medians[name]
                    report.figures[f"ssd_{figure}_speedup_vs_tokens_{length}"] = ratio


def _onto_the_ssd(url: str) -> None:
    wait_until_stored(url)
    forget(url)


def _ttft(
    servers: Sequence[server.Server],
    contexts: Sequence[Context],
    before: Callable[[str], None] | None = None,
) -> Mapping[str, Sequence[float]]:
    """Returns TTFTs in seconds by system, of contexts that the device does not have by then.

    Args:
        before: called with the URL of a server before each request that is measured.
    """
    from sgl_ext.bench.harness.load_generator import Request, run

    found: dict[str, list[float]] = {each.system.name: [] for each in servers}
    for turn in range(2):
        for number, context in enumerate(contexts):
            for one in rotated(servers, turn + number):
                begin = context.length + _NEW * turn  # another question each time
                tokens = [*context.heard, *context.tokens[begin : begin + _NEW]]
                if turn and before is not None and one.system.name != RECOMPUTE:
                    before(one.url)
                (timing,) = run(one.url, [Request(tokens, 1)])
                if turn:
                    found[one.system.name].append(timing.ttft)
    return found


def _of_length(
    report: Report,
    what: str,
    length: int,
    ttft: Mapping[str, Sequence[float]],
    loading: str,
    prefix: str = "",
) -> None:
    medians = {name: statistics.median(each) for name, each in ttft.items()}
    compute, load = medians[RECOMPUTE], medians[loading]
    for name, each in ttft.items():
        report.runs.append(
            {
                "what": what,
                "system": name,
                "tokens": length,
                "samples": len(each),
                "over_bound": medians[name] * (compute + load) / (compute * load),
            }
            | summary(each, "ttft_ms", 1e3)
        )
    alone = (name for name in (RECOMPUTE, HICACHE, loading) if name in ttft)
    best = min((ttft[name] for name in alone), key=statistics.median)
    for name, figure in ((LAYERS, "layers"), (TOKENS, "tokens"), (AUTO, "auto")):
        speedup = ratio_of_medians(best, ttft[name])
        report.figures[f"{prefix}{figure}_speedup_vs_best_single_{length}"] = speedup
