"""TTFT against the share of the prompt that was sent before, with more prefixes than fit a device.

Every prompt of a share is sent before any of them is continued. Stock SGLang has therefore evicted
what it could have found, and the others find it below the device.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sgl_ext.bench.field.systems import ratios, rotated
from sgl_ext.bench.harness.report import Report, summary
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
        prefixes: different prompts of each share.
        length: tokens of a prompt.
    """

    percentages: Sequence[int]
    prefixes: int
    length: int


class Pair(NamedTuple):
    """Prompt that fills the cache, and a later one that begins as it does; token ids."""

    before: list[int]
    after: list[int]


def pairs(percentage: int, count: int, length: int) -> list[Pair]:
    """Returns random pairs of prompts, whose common prefix is a percentage of their length."""
    chance = random.Random(f"hit rate/{percentage}")  # noqa: S311
    common = length * percentage // 100
    found = []
    for _ in range(count):
        before, other = (chance.choices(_TOKENS, k=length) for _ in range(2))
        while common < length and other[common] == before[common]:
            other[common] = chance.choice(_TOKENS)
        found.append(Pair(before, before[:common] + other[common:]))
    return found


def report_hit_rate(report: Report, servers: Sequence[Server], sizes: HitRateSizes) -> None:
    """Adds TTFT and cached share of each server and share."""
    # From the highest to the lowest, so that memory is full of earlier prompts at 0 %.
    order = sorted(sizes.percentages, reverse=True)
    progress = Progress("shares of repeated tokens", len(order) * sizes.prefixes * 2)
    found: dict[int, dict[str, list[Timing]]] = {}
    for percentage in order:
        found[percentage] = _sent(servers, sizes, percentage, progress)
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


def _sent(
    servers: Sequence[Server], sizes: HitRateSizes, percentage: int, progress: Progress
) -> dict[str, list[Timing]]:
    """Returns the timings of the later prompts of a share, by system."""
    from sgl_ext.bench.harness.load_generator import Request, run

    urls = {each.system.name: each.url for each in servers}
    timings: dict[str, list[Timing]] = {name: [] for name in urls}
    prompts = pairs(percentage, sizes.prefixes, sizes.length)
    for number, pair in enumerate(prompts):
        for name in rotated([*urls], number):
            run(urls[name], [Request(pair.before, 1)])
        progress.step()
    for number, pair in enumerate(prompts):
        for name in rotated([*urls], number):
            timings[name] += run(urls[name], [Request(pair.after, 1)])
        progress.step()
    return timings
