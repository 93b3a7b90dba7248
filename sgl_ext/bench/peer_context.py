"""The longest request with the same local KV memory (SwiftCache §5.3), and how it is computed."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import requests

from sgl_ext.bench.peer_servers import COMMON, LAYERS, PAGE, Lent, pair
from sgl_ext.bench.report import Report
from sgl_ext.bench.server import Server, System, live
from sgl_ext.errors import ExtError

_DEADLINE_S = 600.0
_STEP = 4
"""Tokens between two lengths that are tried."""


def report_context(report: Report, local: int, setups: dict[str, Lent], logs: Path) -> None:
    """Adds a run and a figure for each setup.

    Args:
        local: tokens of local KV memory, of all.
        setups: by the figure that it is for.
    """
    stock = System("stock", (*COMMON, "--max-total-tokens", str(local)))
    longest_stock = 0
    worst = 1.0
    for figure, setup in setups.items():
        beside = () if longest_stock else (stock,)
        with pair(setup, logs / figure, beside=beside) as (master, _, *others):
            for server in others:
                longest_stock, _ = _longest(server, local)
            longest, seconds = _longest(master, int(setup.formula))
            state = live(master.url)["peer"]
        waited = state.get("stream_waited_seconds", 0.0)
        worst = min(worst, longest / setup.formula)
        report.figures[figure] = longest / longest_stock
        report.runs.append(
            {
                "what": "context",
                "stream": setup.stream,
                "lent_over_local": setup.borrowed / setup.local,
                "local_tokens": setup.local,
                "layer_buffers_tokens": setup.buffers * setup.borrowed / LAYERS,
                "longest_stock": longest_stock,
                "longest": longest,
                "formula": setup.formula,
                "seconds": seconds,
                "waited_seconds": waited,
            }
        )
    report.figures["capacity_vs_formula"] = worst


def _longest(server: Server, most: int) -> tuple[int, float]:
    """The longest prompt that is answered, at most ``most`` tokens, and how long that took."""
    chance = random.Random(most)  # noqa: S311
    ids = [chance.randrange(1000, 40_000) for _ in range(most)]
    # SGLang keeps a page beside the prompt's whole ones; below it refuses, or waits for ever.
    begin = (most - 2) // PAGE * PAGE - PAGE
    for length in range(begin, begin - 8 * PAGE, -_STEP):
        began = time.monotonic()
        if _answers(server, ids[:length]):
            return length, time.monotonic() - began
    raise ExtError(f"{server.url} answers no request of {begin} tokens or a little less")


def _answers(server: Server, ids: list[int]) -> bool:
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    found = requests.post(f"{server.url}/generate", json=body, timeout=_DEADLINE_S)
    return found.ok and found.json()["meta_info"]["completion_tokens"] == 1
