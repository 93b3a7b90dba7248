"""From which length on host memory's prefixes are restored by tokens, not by layers: L_delta."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_ext.bench import server
from sgl_ext.bench.linked import generate
from sgl_ext.config import ExtConfig, Restore
from sgl_ext.restore.profile import Curve

_LENGTHS = (128, 256, 512, 1024)
"""Of prefixes."""
_POOL = 2048
"""Tokens of the device, which soon forgets what it has computed."""
_SAMPLES = 10
_MARGIN = 1.03
"""Times another's seconds are as good: what differs less is noise."""
_WAYS = ("tokens", "layers")
_TOKEN_IDS = (1000, 9000)


def host_curves(
    model: Path, config: ExtConfig, restore: Restore, arguments: Sequence[str], logs: Path
) -> dict[str, Curve]:
    """Seconds until a prefix of each length that host memory has is restored, in either way.

    Args:
        config: its only tier is host memory.
    """
    from sgl_ext.calibrate import system

    small = (*arguments, "--max-total-tokens", str(_POOL))
    systems = []
    for way in _WAYS:
        forced = {"restore": restore.model_copy(update={"host": way})}
        systems.append(system(way, config.model_copy(update=forced), small))
    with server.serve(systems, model, logs, deadline=config.start_deadline) as servers:
        found: dict[str, Curve] = {way: {} for way in _WAYS}
        for length in _LENGTHS:
            for one, seconds in zip(servers, _restored(servers, length), strict=True):
                found[one.system.name][length] = seconds
    return found


def crossover_of(tokens: Curve, layers: Curve) -> int:
    """The length from which on restoring by ``tokens`` is not slower than by ``layers``.

    Args:
        tokens, layers: seconds by length, of the same lengths.
    """
    slower = [length for length, seconds in tokens.items() if seconds > _MARGIN * layers[length]]
    return max(slower, default=0) + 1


def _restored(servers: Sequence[server.Server], length: int) -> list[float]:
    """Of each server: what prompts take when the device has forgotten them."""
    choose = random.SystemRandom()
    prompts = [
        [choose.randrange(*_TOKEN_IDS) for _ in range(length)]
        for _ in range(max(_POOL // length + 2, _SAMPLES))
    ]
    seconds: list[list[float]] = [[] for _ in servers]
    for again in (False, True):
        for number, prompt in enumerate(prompts):
            for turn in range(len(servers)):
                at = (number + turn) % len(servers)
                begin = time.monotonic()
                generate(servers[at].url, [*prompt, choose.randrange(*_TOKEN_IDS)], 1)
                if again:
                    seconds[at].append(time.monotonic() - begin)
    return [statistics.median(each) for each in seconds]
