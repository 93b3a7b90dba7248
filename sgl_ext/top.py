"""Live tables of running servers: tiers, decisions and lent memory (``sgl-ext top``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sgl_ext.errors import ExtError

_TIMEOUT_S = 10.0

State = Mapping[str, Any]
"""State that one scheduler reports."""


def states_of(url: str) -> list[State]:
    """Returns the states of the schedulers with tiers or peers, of the server at ``url``.

    Raises:
        ExtError: No server answers there, or it has neither tiers nor peers.
    """
    try:
        answer = requests.get(f"{url}/server_info", timeout=_TIMEOUT_S)
        answer.raise_for_status()
        states = [state.get("sgl_ext", {}) for state in answer.json()["internal_states"]]
        found = [state for state in states if "tiers" in state or "peer" in state]
    except (requests.RequestException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExtError(
            f"cannot query {url}/server_info: {error}; is a server running there?"
        ) from None
    if not found:
        raise ExtError(
            f"the server at {url} has neither tiers nor peers; start it with --enable-ext and a "
            "tiers or peer section"
        )
    return found


def watch(urls: Sequence[str], *, interval: float = 1.0, once: bool = False) -> None:
    """Shows tables until the program is interrupted; rates are means over the last interval.

    An error after the first table is shown below it, and the servers are queried again.

    Args:
        urls: Base URLs of the servers.
        interval: Seconds between two queries.
        once: Prints one table and returns.

    Raises:
        ExtError: The first query fails; see :func:`states_of`.
    """

    def ask() -> list[State]:
        return [state for url in urls for state in states_of(url)]

    before, then = ask(), time.monotonic()
    if once:
        Console().print(tables(before, before, 1.0))
        return
    with Live(tables(before, before, 1.0), refresh_per_second=4) as live:
        while True:
            time.sleep(interval)
            try:
                now, at = ask(), time.monotonic()
            except ExtError as error:  # the server may come back
                live.update(Group(tables(before, before, 1.0), escape(str(error))))
                continue
            live.update(tables(now, before, at - then))
            before, then = now, at


def tables(now: list[State], before: list[State], seconds: float) -> Group:
    """Returns the tables of schedulers' states; rates are those since ``before``."""
    tables = []
    if any("tiers" in state for state in now):
        tiers, old = ([each.get("tiers", {}) for each in states] for states in (now, before))
        tables.append(_table(tiers, old, seconds))
    if any("peer" in state for state in now):
        tables.append(_peers(now))
    tables.append(_decisions(now))
    return Group(*tables)


def _decisions(states: list[State]) -> Table:
    """Returns the decisions of the cost model with their mean durations, and its errors."""
    table = Table(
        "scheduler", "decision or cost", "choices", "predicted ms", "measured ms", "error",
        box=None, pad_edge=False,
    )  # fmt: skip
    for number, state in enumerate(states):
        for kind, found in state.get("planning", {}).get("decisions", {}).items():
            choices = found["choices"]

            def mean(what: str, of: str, choices: Any = choices) -> str:
                count = sum(each[of] for each in choices.values())
                total = sum(each[what] for each in choices.values())
                return f"{1e3 * total / count:,.1f}" if count else ""

            table.add_row(
                str(number),
                escape(kind),
                escape(", ".join(f"{name} {each['count']:,}" for name, each in choices.items())),
                mean("predicted_seconds", "count"),
                mean("measured_seconds", "ended"),
                "" if found["error"] is None else f"{found['error']:.0%}",
            )
    return table


def _peers(states: list[State]) -> Table:
    table = Table(
        "scheduler", "role", "lent MiB", "used MiB", "lendable MiB", "lent", "reclaimed MiB",
        "remarks", box=None, pad_edge=False,
    )  # fmt: skip

    def mib(size: int) -> str:
        return f"{size / 2**20:,.1f}"

    for number, state in enumerate(states):
        if (peer := state.get("peer")) is None:
            continue
        if peer["role"] == "worker":
            unit = peer["unit"] or {"bytes": 0, "whole": False}
            units = peer["lent_bytes"] // max(unit["bytes"], 1)
            kind = f"{units:,} {'units' if unit['whole'] else 'pages'}"
            lost = f"memory replaced {peer['replaced']} times" if peer["replaced"] else ""
            table.add_row(
                str(number), "worker", mib(peer["lent_bytes"]), mib(peer["used_bytes"]),
                mib(peer["lendable_bytes"]), f"{kind} of {unit['bytes']:,} B",
                mib(peer["reclaimed"]), lost or escape(peer["refused"]),
            )  # fmt: skip
            continue
        for worker in peer["workers"]:
            table.add_row(
                str(number), f"master of {worker['pid']}", mib(worker["lent_bytes"]),
                mib(worker["used_bytes"]), "", f"{worker['blocks']:,} blocks", "",
                escape(worker["refused"]),
            )  # fmt: skip
        if not peer["workers"]:
            table.add_row(str(number), "master", "", "", "", "", "", "no worker")
    return table


def _table(
    now: list[Mapping[str, Any]],
    before: list[Mapping[str, Any]],
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
                moved = max(tier[field] - old[field], 0)  # counters decrease only after a restart
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
