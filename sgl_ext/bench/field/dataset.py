"""Data set of one's own, sent to each server by SGLang's own benchmark as a program."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_ext.bench.field.systems import ratios
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.errors import ExtError
from sgl_ext.progress import steps
from sgl_ext.serving.server import Server

_LINES = 8
"""Last lines of the benchmark's output that an error has."""


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
        ExtError: the benchmark has failed on a server, which has answered no request.
    """
    medians: dict[str, float] = {}
    throughput: dict[str, float] = {}
    for server in steps(servers, "servers"):
        name, log = server.system.name, logs / f"dataset-{server.system.name}.jsonl"
        found = _benchmark(server.url, model, log, arguments)
        answers = Answers.of(found)
        if not answers.ttft:
            raise ExtError(
                f"{name} answered none of the {answers.refused} requests, whose prompts have "
                f"{min(found['input_lens'])} tokens and more: {answers.error or 'no token came'}; "
                f"read {log} and {server.log}"
            )
        medians[name] = statistics.median(answers.ttft)
        throughput[name] = answers.tokens / found["duration"]
        report.runs.append(
            {
                "what": f"dataset {found['dataset_name']}", "system": name,
                **summary(answers.ttft, "ttft_ms", 1e3), **summary(answers.between, "itl_ms", 1e3),
                "samples": len(answers.ttft), "refused": answers.refused,
                "tokens_per_s": throughput[name], "cached_share": answers.cached / answers.prompts,
            }
        )  # fmt: skip
    report.figures |= ratios("dataset_ttft_p50", medians)
    report.figures |= ratios("dataset_throughput", throughput)


@dataclass(frozen=True)
class Answers:
    """Requests that a server has answered, of a record with ``--output-details``.

    Attributes:
        ttft: seconds to the first token of each.
        between: seconds between the tokens of all.
        prompts: tokens of their prompts.
        cached: those of them that were cached.
        tokens: tokens of their prompts and answers.
        refused: number of the other requests.
        error: first error among these.
    """

    ttft: list[float]
    between: list[float]
    prompts: int
    cached: int
    tokens: int
    refused: int
    error: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Answers:
        # The benchmark counts a stream that has only an error as an answer without tokens.
        errors = record["errors"]
        answered = [
            at for at, ttft in enumerate(record["ttfts"]) if ttft > 0 and not errors[at]
        ]  # fmt: skip
        prompts = sum(record["input_lens"][at] for at in answered)
        return cls(
            ttft=[record["ttfts"][at] for at in answered],
            between=[seconds for at in answered for seconds in record["itls"][at]],
            prompts=prompts,
            cached=sum(record["cached_tokens"][at] for at in answered),
            tokens=prompts + sum(record["output_lens"][at] for at in answered),
            refused=len(errors) - len(answered),
            error=next((each.strip() for each in errors if each), ""),
        )


def _benchmark(url: str, model: Path, log: Path, arguments: Sequence[str]) -> dict[str, Any]:
    log.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url,
        "--model", str(model), "--tokenizer", str(model), "--cache-report", "--disable-tqdm",
        "--output-file", str(log), "--output-details", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not log.exists():
        last = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
        raise ExtError(f"SGLang's benchmark failed against {url}; its output ends with:\n{last}")
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return found
