"""SGLang's own benchmark, ``sglang.benchmark.serving``, as a function."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.benchmark import serving

from sgl_ext.bench.harness.load_generator import RequestError

_LINES = 8
"""Last lines of the benchmark's output that an error has."""


@dataclass(frozen=True)
class Served:
    """Requests that a server has answered with text.

    Attributes:
        dataset: name of the data set.
        ttft: seconds to the first token of each.
        between: seconds between the tokens of all.
        prompts: tokens of their prompts.
        cached: those of them that were not computed.
        tokens_per_s: tokens of their prompts and answers per second of the run.
        refused: number of the other requests: with an error, or without text.
        error: first error of these, empty if there is none.
    """

    dataset: str
    ttft: list[float]
    between: list[float]
    prompts: int
    cached: int
    tokens_per_s: float
    refused: int
    error: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Served:
        """Reads a record of the benchmark with the details of each request."""
        # The benchmark counts a stream that has only an error as an answer without text.
        errors = record["errors"]
        answered = [at for at, ttft in enumerate(record["ttfts"]) if ttft > 0 and not errors[at]]
        prompts = sum(record["input_lens"][at] for at in answered)
        tokens = prompts + sum(record["output_lens"][at] for at in answered)
        return cls(
            dataset=record["dataset_name"],
            ttft=[record["ttfts"][at] for at in answered],
            between=[seconds for at in answered for seconds in record["itls"][at]],
            prompts=prompts,
            cached=sum(record["cached_tokens"][at] for at in answered),
            tokens_per_s=tokens / record["duration"],
            refused=len(errors) - len(answered),
            error=next((each.strip()[-2000:] for each in errors if each), ""),
        )


def benchmark(url: str, model: Path, log: Path, arguments: Sequence[str]) -> Served:
    """Runs SGLang's benchmark against a server.

    Args:
        model: directory of the served model.
        log: file that the benchmark's output is appended to; its record is beside it, ``.jsonl``.
        arguments: further arguments of its command line, such as ``--dataset-name``.

    Raises:
        RequestError: the benchmark failed, or no request was answered with text.
    """
    record = log.with_suffix(".jsonl")
    record.unlink(missing_ok=True)
    began = len(log.read_text()) if log.exists() else 0
    command = [
        serving.__name__, "--backend", "sglang", "--base-url", url, "--model", str(model),
        "--tokenizer", str(model), "--cache-report", "--disable-tqdm", "--warmup-requests", "0",
        "--output-file", str(record), "--output-details", *arguments,
    ]  # fmt: skip
    with (
        log.open("a") as sink, redirect_stdout(sink), redirect_stderr(sink),
        mock.patch.object(sys, "argv", command),
    ):  # fmt: skip
        try:
            serving.cli_main()
            found = Served.of(json.loads(record.read_text().splitlines()[-1]))
        # It exits if an argument is wrong, has no percentiles if all requests failed, and raises
        # whatever a file of another format makes it raise.
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=sink)
            sink.flush()
            last = "\n".join(log.read_text()[began:].splitlines()[-_LINES:])
            raise RequestError(
                f"SGLang's benchmark failed against {url}; its output {log} ends with:\n{last}"
            ) from error
    if not found.ttft:
        raise RequestError(
            f"{url} answered none of {found.refused} requests with text: "
            f"{found.error or 'the streams had errors only'}; read {record} and the server's log"
        )
    return found
