"""Data set of one's own, sent to each server by SGLang's own benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from sgl_ext.bench.field.systems import ratios
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.progress import steps
from sgl_ext.serving.server import Server


def report_dataset(
    report: Report, servers: Sequence[Server], model: Path, logs: Path, arguments: Sequence[str]
) -> None:
    """Adds TTFT, time between tokens, throughput and cached share of each server.

    Every server gets the same requests, one server after the other. Requests that a server
    refuses, such as those whose prompt exceeds its context, are counted apart.

    Args:
        logs: directory of the benchmark's own output, a file for each server.
        arguments: arguments of ``sglang.benchmark.serving``, such as ``--dataset-name``.

    Raises:
        RequestError: the benchmark has failed on a server, or the server has answered no request.
    """
    from sgl_ext.bench.field.sglang_client import benchmark

    medians: dict[str, float] = {}
    throughput: dict[str, float] = {}
    for server in steps(servers, "servers"):
        name = server.system.name
        found = benchmark(server.url, model, logs / f"dataset-{name}.log", arguments)
        medians[name] = statistics.median(found.ttft)
        throughput[name] = found.tokens_per_s
        report.runs.append(
            {
                "what": f"dataset {found.dataset}", "system": name,
                "samples": len(found.ttft), "refused": found.refused,
                **summary(found.ttft, "ttft_ms", 1e3), **summary(found.between, "itl_ms", 1e3),
                "tokens_per_s": found.tokens_per_s, "cached_share": found.cached / found.prompts,
            }
        )  # fmt: skip
    report.figures |= ratios("dataset_ttft_p50", medians)
    report.figures |= ratios("dataset_throughput", throughput)
