"""Servers with the KV of contexts on an SSD that is slowed down to a given rate."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_ext.bench.restore.contexts import Context
from sgl_ext.errors import ExtError
from sgl_ext.serving import server
from sgl_ext.serving.http import generate, wait_until_stored

if TYPE_CHECKING:
    from sgl_ext.bench.harness.load_generator import Timing

PAGE = 16
RECOMPUTE, LOAD, CAKE, LONGEST, OURS = "recompute", "load", "cake", "longest", "shortest"
RECOMPUTE_IN_CHUNKS = "recompute, 512 at a time"
"""System in which prompts that arrive together end one after another, as restored ones do."""
_POLICIES = (CAKE, LONGEST, OURS)
_CAPACITY = "12GiB"
_DEADLINE_S = 600.0


def base(pool: int) -> tuple[str, ...]:
    """Returns the arguments that all servers share.

    Args:
        pool: device pool, in tokens.
    """
    return ("--max-total-tokens", str(pool), "--page-size", str(PAGE), *server.BESIDE_OTHERS)


def fill(
    directory: Path, contexts: Sequence[Context], model: Path, pool: int, logs: Path, *more: str
) -> dict[str, float]:
    """Computes all contexts on a server that stores their KV on an SSD, in ``directory``.

    Args:
        pool: device pool, in tokens.
        logs: directory of the server's log.
        more: further arguments of the server.

    Returns:
        Seconds that each context took, by its name.
    """
    directory.mkdir()
    ssd = {"directories": [str(directory)], "capacity": _CAPACITY, "keep_after": 1}
    config = {"tiers": {"ssd": ssd, "staging": "1GiB"}}
    system = server.System("fill", (*base(pool), *server.extension(config), *more))
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
    *more: str,
) -> list[server.System]:
    """Returns the systems with these names, each with its own copy of the stored KV.

    Args:
        filled: directory that :func:`fill` has written.
        scratch: directory for the copies.
        pool: device pool, in tokens.
        staging: size of the host memory for pages in transit.
        bytes_per_second: rate of the SSD.
        more: further arguments of all servers.
    """
    found = []
    for name in names:
        if name in (RECOMPUTE, RECOMPUTE_IN_CHUNKS):
            chunks = ("--chunked-prefill-size", "512") if name == RECOMPUTE_IN_CHUNKS else ()
            found.append(server.System(name, (*base(pool), *chunks, *more)))
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
        arguments = (*base(pool), *server.extension(config), *more)
        found.append(server.System(name, arguments))
    return found


def loaded(context: Context, timing: Timing) -> None:
    """Raises ExtError if a server that should only load has computed a part of the context."""
    whole = context.length // PAGE * PAGE
    if timing.cached_tokens < whole:
        raise ExtError(
            f"{timing.cached_tokens} of {whole} tokens of {context.name} were loaded, and the "
            f"rest was computed; the time of loading alone was not measured"
        )
