"""``sgl-ext top``: what a running server's tiers do, once a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import requests
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sgl_ext.errors import ExtError

_TIMEOUT_S = 10.0


def tiers_of(url: str) -> list[dict[str, Mapping[str, Any]]]:
    """The tiers of each scheduler of the server at ``url``, by name.

    Raises:
        ExtError: no server there, or one without tiers.
    """
    try:
        answer = requests.get(f"{url}/server_info", timeout=_TIMEOUT_S)
        answer.raise_for_status()
        states = answer.json()["internal_states"]
        tiers = [state["sgl_ext"]["tiers"] for state in states if "sgl_ext" in state]
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        raise ExtError(
            f"cannot ask {url}/server_info: {error}; is a server running there?"
        ) from None
    if not tiers:
        raise ExtError(
            f"the server at {url} has no tiers; start it with --enable-ext and a tiers section"
        )
    return tiers


def watch(url: str, *, interval: float = 1.0, once: bool = False) -> None:
    """Shows a table until it is interrupted; rates are over the last interval.

    Raises:
        ExtError: see :func:`tiers_of`.
    """
    before, then = tiers_of(url), time.monotonic()
    if once:
        Console().print(_table(before, before, 1.0))
        return
    with Live(_table(before, before, 1.0), refresh_per_second=4) as live:
        while True:
            time.sleep(interval)
            now, at = tiers_of(url), time.monotonic()
            live.update(_table(now, before, at - then))
            before, then = now, at


def _table(
    now: list[dict[str, Mapping[str, Any]]],
    before: list[dict[str, Mapping[str, Any]]],
    seconds: float,
) -> Table:
    table = Table(
        "scheduler", "tier", "pages", "full", "hit tokens", "hits/s", "load MB/s", "store MB/s",
        "queue", "failures", box=None, pad_edge=False,
    )  # fmt: skip
    for number, tiers in enumerate(now):
        for name, tier in tiers.items():
            old = before[number].get(name, tier) if number < len(before) else tier
            capacity = tier["capacity_pages"]

            def rate(field: str, tier: Any = tier, old: Any = old) -> float:
                moved = max(tier[field] - old[field], 0)  # less only after a restart
                return float(moved) / seconds

            failures = ", ".join(f"{why} {count}" for why, count in tier["failures"].items())
            table.add_row(
                str(number),
                name if tier["available"] else f"[red]{name} (off)[/]",
                f"{tier['pages']:,}",
                f"{tier['pages'] / capacity:.0%}" if capacity else "",
                f"{tier['hit_tokens']:,}",
                f"{rate('hit_tokens'):,.0f}",
                f"{rate('loaded_bytes') / 1e6:,.0f}",
                f"{rate('stored_bytes') / 1e6:,.0f}",
                str(tier["queue_depth"]),
                escape(failures),
            )
    return table
