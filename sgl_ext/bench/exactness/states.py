"""State of a server in an exactness run: what it holds, and what its powers have done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import psutil

from sgl_ext.bench.exactness.servers import Victim

_DEADLINE_S = 60.0


async def state_of(http: aiohttp.ClientSession, victim: Victim) -> dict[str, Any]:
    """Returns the internal state and load of a server's scheduler; empty without an answer."""
    if victim.down:
        return {}
    try:
        url = f"{victim.url}/server_info"
        async with asyncio.timeout(_DEADLINE_S), http.get(url) as answer:
            found: dict[str, Any] = (await answer.json())["internal_states"][0]
        url = f"{victim.url}/v1/loads?include=core"
        async with asyncio.timeout(_DEADLINE_S), http.get(url) as answer:
            return {**found, "load": (await answer.json())["loads"][0]}
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError):
        return {}


def counts_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the counters that show which powers a server used."""
    found: dict[str, float] = {}
    if swap := state.get("swap"):
        names = ("swapped_out", "swapped_in", "recomputed")
        found |= {name: swap[name] for name in names}
    for name, tier in state.get("tiers", {}).items():
        found[f"{name}_hit_tokens"] = tier["hit_tokens"]
    if peer := state.get("peer"):
        names = ("retracted", "reclaimed", "replaced")
        found |= {f"peer_{name}": peer[name] for name in names if name in peer}
    return found


def held(state: Mapping[str, Any], *, flushed: bool = False) -> str:
    """Returns a description of the resources that a server holds; empty if there are none.

    Args:
        flushed: True if its caches were flushed, so that no slot may be in use.
    """
    ours, load = state.get("sgl_ext", {}), state["load"]
    found = {
        "running": load.get("num_running_reqs", 0),
        "waiting": load.get("num_waiting_reqs", 0),
        "swapped": ours.get("swap", {}).get("swapped", 0),
        "followed": ours.get("clusters", {}).get("followed", 0),
        **{f"{name}_queue": tier["queue_depth"] for name, tier in ours.get("tiers", {}).items()},
        "used tokens": load.get("num_used_tokens", 0) if flushed else 0,
    }
    return ", ".join(f"{count} {name}" for name, count in found.items() if count)


def descriptors(victim: Victim) -> int:
    """Returns the open file descriptors of all processes of a server."""
    with suppress(psutil.Error):
        process = psutil.Process(victim.server.process.pid)
        return sum(each.num_fds() for each in (process, *process.children(recursive=True)))
    return 0
