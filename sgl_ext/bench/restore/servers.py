"""Servers whose SSD holds the KV of contexts, and answers as slowly as is asked for."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_ext.bench.chunks.linked import generate
from sgl_ext.bench.harness import server
from sgl_ext.bench.restore.contexts import Context
from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from sgl_ext.bench.harness.load_generator import Timing

PAGE = 16
RECOMPUTE, LOAD, CAKE, LONGEST, OURS = "recompute", "load", "cake", "longest", "shortest"
RECOMPUTE_IN_CHUNKS = "recompute, 512 at a time"
"""Prompts that come together end one after the other, as those that are restored do."""
_POLICIES = (CAKE, LONGEST, OURS)
_CAPACITY = "12GiB"
_DEADLINE_S = 600.0


def base(pool: int) -> tuple[str, ...]:
    """Arguments of all servers.

    Args:
        pool: tokens that the device holds.
    """
    return ("--max-total-tokens", str(pool), "--page-size", str(PAGE), *server.BESIDE_OTHERS)


def fill(
    directory: Path, contexts: Sequence[Context], model: Path, pool: int, logs: Path
) -> dict[str, float]:
    """Has a server compute all contexts and keep their KV on an SSD in ``directory``.

    Returns:
        Seconds that each took, by its name.
    """
    directory.mkdir()
    ssd = {"directories": [str(directory)], "capacity": _CAPACITY, "keep_after": 1}
    config = json.dumps({"tiers": {"ssd": ssd, "staging": "1GiB"}})
    system = server.System("fill", (*base(pool), "--enable-ext", "--ext-config", config))
    seconds = {}
    with server.serve([system], model, logs) as (filling,):
        for context in contexts:
            begin = time.monotonic()
            generate(filling.url, context.heard, 1)
            seconds[context.name] = time.monotonic() - begin
            wait_until_stored(filling.url)
    return seconds


def systems(
    names: Sequence[str],
    filled: Path,
    scratch: Path,
    pool: int,
    staging: str,
    bytes_per_second: int,
) -> list[server.System]:
    """Each with its own copy of what :func:`fill` has left in ``filled``."""
    found = []
    for name in names:
        if name in (RECOMPUTE, RECOMPUTE_IN_CHUNKS):
            chunks = ("--chunked-prefill-size", "512") if name == RECOMPUTE_IN_CHUNKS else ()
            found.append(server.System(name, (*base(pool), *chunks)))
            continue
        directory = scratch / name
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(filled, directory)
        ssd = {
            "directories": [str(directory)],
            "capacity": _CAPACITY,
            "emulate": {"bytes_per_second": bytes_per_second},
        }
        config: dict[str, object] = {
            "tiers": {"ssd": ssd, "staging": staging, "wait": _DEADLINE_S},
        }
        if name in _POLICIES:
            config["restore"] = {"policy": name}
        arguments = (*base(pool), "--enable-ext", "--ext-config", json.dumps(config))
        found.append(server.System(name, arguments))
    return found


def loaded(context: Context, timing: Timing) -> None:
    """Raises ExtError if a server that should only load has computed some of the context."""
    whole = context.length // PAGE * PAGE
    if timing.cached_tokens < whole:
        raise ExtError(
            f"{timing.cached_tokens} of {whole} tokens of {context.name} were loaded, and the "
            f"rest computed: what loading alone takes was not measured"
        )


def wait_until_stored(url: str) -> None:
    """Returns when the server's tiers have stored what they were given.

    Raises:
        ExtError: they have not for too long.
    """
    give_up = time.monotonic() + _DEADLINE_S
    quiet = 0
    while time.monotonic() < give_up:
        storing = any(tier["queue_depth"] for tier in server.live(url)["tiers"].values())
        quiet = 0 if storing else quiet + 1
        if quiet == 3:
            return
        time.sleep(0.05)
    raise ExtError(f"{url} still stores after {_DEADLINE_S} s")
