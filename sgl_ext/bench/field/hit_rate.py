"""TTFT against the share of the prompt that was sent before, with more prefixes than fit a device.

The prompts are sent one after another, then, for each share, prompts that begin as they do, in the
same order. Stock SGLang has therefore evicted what it could have found, and the others find it
below the device.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_ext.bench.field.systems import ratios
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import rotated
from sgl_ext.progress import Progress
from sgl_ext.serving.server import Server

if TYPE_CHECKING:
    from sgl_ext.bench.harness.load_generator import Timing

_TOKENS = range(1000, 40_000)
"""Token ids of random prompts."""


@dataclass(frozen=True)
class HitRateSizes:
    """Sizes of the sweep.

    Attributes:
        percentages: shares of a prompt that were sent before, in per cent.
        prefixes: number of different prompts.
        length: tokens of a prompt.
    """

    percentages: Sequence[int]
    prefixes: int
    length: int


def prompts(count: int, length: int) -> list[list[int]]:
    """Returns random prompts, in token ids."""
    chance = random.Random("hit rate")  # noqa: S311
    return [chance.choices(_TOKENS, k=length) for _ in range(count)]


def continued(prompt: Sequence[int], percentage: int) -> list[int]:
    """Returns a prompt of the same length of which exactly that percentage is that of ``prompt``.

    The rest is random.
    """
    common = [*prompt[: len(prompt) * percentage // 100]]
    chance = random.Random(f"{percentage}/{prompt}")  # noqa: S311
    other = chance.choices(_TOKENS, k=len(prompt) - len(common))
    while other and other[0] == prompt[len(common)]:
        other[0] = chance.choice(_TOKENS)
    return common + other


def report_hit_rate(report: Report, servers: Sequence[Server], sizes: HitRateSizes) -> None:
    """Adds TTFT and cached share of each server and share."""
    before = prompts(sizes.prefixes, sizes.length)
    progress = Progress("repeated prompts", (1 + len(sizes.percentages)) * sizes.prefixes)
    _send(servers, before, progress)
    # A share needs what the larger ones have used just before.
    found = {
        percentage: _send(servers, [continued(each, percentage) for each in before], progress)
        for percentage in sorted(sizes.percentages, reverse=True)
    }
    for percentage in sorted(found):
        medians: dict[str, float] = {}
        for name, timings in found[percentage].items():
            ttft = [each.ttft for each in timings]
            medians[name] = statistics.median(ttft)
            report.runs.append(
                {"what": "hit-rate", "system": name, "repeated_percent": percentage}
                | {"samples": len(ttft)}
                | summary(ttft, "ttft_ms", 1e3)
                | {
                    "cached_share": sum(each.cached_tokens for each in timings)
                    / (len(timings) * sizes.length)
                }
            )
        report.figures |= ratios(f"hit_rate_{percentage}_ttft_p50", medians)


def _send(
    servers: Sequence[Server], those: Sequence[Sequence[int]], progress: Progress
) -> dict[str, list[Timing]]:
    """Sends each prompt to all servers in turn, and returns the timings by system."""
    from sgl_ext.bench.harness.load_generator import Request, run

    urls = {each.system.name: each.url for each in servers}
    timings: dict[str, list[Timing]] = {name: [] for name in urls}
    for number, prompt in enumerate(those):
        for name in rotated(urls, number):
            timings[name] += run(urls[name], [Request(prompt, 1)])
        progress.step()
    return timings
