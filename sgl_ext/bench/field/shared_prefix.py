"""SGLang's generated shared prefixes, sent to each server by SGLang's own benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_ext.bench.field.systems import ratios
from sgl_ext.bench.harness.load_generator import RequestError
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved
from sgl_ext.serving.server import Server

if TYPE_CHECKING:
    from sgl_ext.bench.field.sglang_client import Served


@dataclass(frozen=True)
class SharedPrefixSizes:
    """Sizes of the data set ``generated-shared-prefix``: prompts with a system prompt per group.

    Attributes:
        groups: number of groups.
        prompts: prompts of each group.
        system: tokens of a system prompt.
        question: tokens of a prompt after its system prompt.
        answer: tokens of an answer.
        parallel: most requests that are sent at the same time.
        runs: number of runs on each server; each has other prompts.
    """

    groups: int
    prompts: int
    system: int
    question: int
    answer: int
    parallel: int
    runs: int

    def arguments(self, number: int) -> list[str]:
        """Returns arguments of SGLang's benchmark for run ``number``, with prompts as token ids."""
        given = {
            "dataset-name": "generated-shared-prefix", "gsp-num-groups": self.groups,
            "gsp-prompts-per-group": self.prompts, "gsp-system-prompt-len": self.system,
            "gsp-question-len": self.question, "gsp-output-len": self.answer,
            "max-concurrency": self.parallel, "seed": number,
        }  # fmt: skip
        # All requests are sent at once, as far as the concurrency allows: times of arrival would
        # differ between servers, because their generator also draws the prompts.
        words = (word for name, value in given.items() for word in (f"--{name}", str(value)))
        return ["--tokenize-prompt", *words]


def report_shared_prefix(
    report: Report, servers: Sequence[Server], model: Path, logs: Path, sizes: SharedPrefixSizes
) -> None:
    """Adds TTFT, throughput and cached share of each server.

    Args:
        logs: directory of the benchmark's own output, a file for each server.

    Raises:
        RequestError: a request failed.
    """
    from sgl_ext.bench.field.sglang_client import benchmark

    def run(server: Server, number: int) -> Served:
        log = logs / f"shared-prefix-{server.system.name}.log"
        found = benchmark(server.url, model, log, sizes.arguments(number))
        if found.error:
            raise RequestError(found.error)
        return found

    found = interleaved([partial(run, each) for each in servers], sizes.runs, "shared prefixes")
    medians: dict[str, float] = {}
    throughput: dict[str, float] = {}
    for server, runs in zip(servers, found, strict=True):
        name = server.system.name
        ttft = [seconds for each in runs for seconds in each.ttft]
        medians[name] = statistics.median(ttft)
        throughput[name] = statistics.median(each.tokens_per_s for each in runs)
        report.runs.append(
            {"what": "shared-prefix", "system": name, "runs": sizes.runs, "samples": len(ttft)}
            | {"refused": sum(each.refused for each in runs)}
            | summary(ttft, "ttft_ms", 1e3)
            | {
                "cached_share": sum(each.cached for each in runs)
                / sum(each.prompts for each in runs),
                "tokens_per_s": throughput[name],
            }
        )
    report.figures |= ratios("shared_prefix_ttft_p50", medians)
    report.figures |= ratios("shared_prefix_throughput", throughput)
