"""Comparison of the answers to conversations with and without preemption, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sgl_ext.bench.chunks.linked import EXACT
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.swap import load
from sgl_ext.bench.swap.load import at_rate, talks
from sgl_ext.bench.swap.systems import OURS, PAGE, STOCK
from sgl_ext.config.swap import EXPERIMENT
from sgl_ext.progress import steps
from sgl_ext.serving import server
from sgl_ext.serving.http import live

_LONGEST = 384
_AT_ONCE = 24
_QUANTUM = 7
"""Iterations between draws of the priorities; SGLang retracts further requests (``_RETRACT``)."""
_RETRACT: Mapping[str, str] = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "11",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}


def report_exact(report: Report, model: Path, logs: Path, count: int, pool: int) -> None:
    """Compares stock SGLang with room for all requests to a server that preempts all the time.

    Args:
        count: number of conversations.
        pool: device pool of the server that preempts, in tokens.
    """
    swap = {"capacity": "1GiB", "quantum": _QUANTUM}
    drawn = {EXPERIMENT: json.dumps({"trace": "random"})}
    config = {"tiers": {"host": {"capacity": "1536MiB"}}, "swap": swap}
    page = ("--page-size", str(PAGE), *EXACT, *server.BESIDE_OTHERS)
    room = ("--max-total-tokens", str(2 * _AT_ONCE * _LONGEST))
    little = ("--max-total-tokens", str(pool), *server.extension(config))
    running = [
        server.System(STOCK, (*page, *room)),
        server.System(OURS, (*page, *little), {**_RETRACT, **drawn}),
    ]
    said = talks(model, count, longest=_LONGEST, pause=0.1, seed=0)
    alike = compared = 0
    with server.serve(running, model, logs) as (stock, ours):
        for begin in steps(range(0, count, _AT_ONCE), "conversations"):
            some = at_rate(said[begin : begin + _AT_ONCE], 1000)
            expected = {each.name: each.tokens for each in load.run(stock.url, some)}
            for each in load.run(ours.url, some):
                compared += 1
                alike += expected[each.name] == each.tokens
        counts = live(ours.url)["swap"]
    report.runs.append(
        {
            "what": "exact",
            "conversations": count,
            "answers": compared,
            "alike": alike,
            "swapped_out": counts["swapped_out"],
            "recomputed": counts["recomputed"],
        }
    )
    report.figures["answers_alike"] = alike / compared
