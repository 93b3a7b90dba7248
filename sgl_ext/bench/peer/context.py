"""Longest request with and without borrowed memory, for equal local memory (SwiftCache §5.3)."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import requests

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.peer.servers import COMMON, LAYERS, PAGE, Lent, pair
from sgl_ext.errors import ExtError
from sgl_ext.serving.http import forget, live
from sgl_ext.serving.server import Server, System

_DEADLINE_S = 600.0
"""Deadline of the first request of a search, in seconds."""
_SEARCHED = 8 * PAGE
"""Width of the range in which the longest prompt is searched, in tokens. Its end is the maximum."""


def report_context(report: Report, local: int, setups: dict[str, Lent], logs: Path) -> None:
    """Adds a run and a figure for each setup.

    Args:
        local: tokens of local KV memory of each server.
        setups: setup of the master, by the name of its figure.
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
                "setup": figure,
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
    """Returns the longest prompt that is answered, in tokens, and its time in seconds.

    Args:
        most: maximum number of tokens.

    Raises:
        ExtError: the server does not answer the shortest prompt of the search.
    """
    chance = random.Random(most)  # noqa: S311
    ids = [chance.randrange(1000, 40_000) for _ in range(most)]
    # SGLang needs a page and two tokens in addition to the prompt.
    longest, too_long = most - PAGE - 2 - _SEARCHED, most - PAGE - 1
    seconds = _answers(server, ids[:longest], _DEADLINE_S)
    if seconds is None:
        raise ExtError(f"{server.url} did not answer a request of {longest} tokens")
    tried = too_long - 1
    # A request that is too long waits without end; a page more hardly takes longer.
    deadline = 2 * seconds + 10
    while longest < too_long - 1:
        found = _answers(server, ids[:tried], deadline)
        if found is None:
            too_long = tried
        else:
            longest, seconds = tried, found
        tried = (longest + too_long) // 2
    return longest, seconds


def _answers(server: Server, ids: list[int], deadline: float) -> float | None:
    """Returns the seconds of a request with an empty cache; None if it is not answered by then."""
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    forget(server.url)
    began = time.monotonic()
    try:
        found = requests.post(f"{server.url}/generate", json=body, timeout=deadline)
    except requests.Timeout:
        requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=_DEADLINE_S)
        return None
    if not found.ok or found.json()["meta_info"]["completion_tokens"] != 1:
        return None
    return time.monotonic() - began
