"""Data set of one's own, sent to each server by SGLang's own benchmark as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_ext.bench.field.systems import ratios
from sgl_ext.bench.harness.report import Report
from sgl_ext.errors import ExtError
from sgl_ext.progress import steps
from sgl_ext.serving.server import Server

_LINES = 8
"""Last lines of the benchmark's output that an error has."""


def report_dataset(
    report: Report, servers: Sequence[Server], model: Path, logs: Path, arguments: Sequence[str]
) -> None:
    """Adds TTFT, time between tokens, throughput and cached share of each server.

    Every server gets the same requests, one server after the other.

    Args:
        logs: directory of the benchmark's own output, a file for each server.
        arguments: arguments of ``sglang.benchmark.serving``, such as ``--dataset-name``.

    Raises:
        ExtError: the benchmark has failed on a server, or a request has.
    """
    medians: dict[str, float] = {}
    throughput: dict[str, float] = {}
    for server in steps(servers, "servers"):
        name = server.system.name
        found = _benchmark(server.url, model, logs / f"dataset-{name}.jsonl", arguments)
        medians[name] = found["median_ttft_ms"] / 1e3
        throughput[name] = found["total_throughput"]
        report.runs.append(
            {
                "what": f"dataset {found['dataset_name']}", "system": name,
                "samples": found["completed"],
                **{f"ttft_ms_p{p}": found[f"{key}_ttft_ms"] for p, key in _PERCENTILES.items()},
                **{f"itl_ms_p{p}": found[f"{key}_itl_ms"] for p, key in _PERCENTILES.items()},
                "tokens_per_s": throughput[name],
                "cached_share": found["cache_report"]["cache_hit_rate_pct"] / 100,
            }
        )  # fmt: skip
    report.figures |= ratios("dataset_ttft_p50", medians)
    report.figures |= ratios("dataset_throughput", throughput)


_PERCENTILES = {50: "median", 90: "p90", 99: "p99"}


def _benchmark(url: str, model: Path, log: Path, arguments: Sequence[str]) -> dict[str, Any]:
    log.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url,
        "--model", str(model), "--tokenizer", str(model), "--cache-report", "--disable-tqdm",
        "--output-file", str(log), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not log.exists():
        last = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
        raise ExtError(f"SGLang's benchmark failed against {url}; its output ends with:\n{last}")
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    if not found["completed"] or "cache_report" not in found:
        raise ExtError(f"no request of SGLang's benchmark was answered by {url}; read {log}")
    return found
