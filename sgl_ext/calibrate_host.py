"""From which length on host memory's prefixes are restored by tokens, not by layers: L_delta."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from sgl_ext.bench.chunks.linked import generate
from sgl_ext.bench.harness import server
from sgl_ext.restore.profile import Curve

_LENGTHS = (128, 256, 512, 1024)
"""Of prefixes."""
POOL = 2048
"""Tokens of the device, which soon forgets what it has computed."""
_SAMPLES = 10
_MARGIN = 1.03
"""Times another's seconds are as good: what differs less is noise."""
WAYS = ("tokens", "layers")
_TOKEN_IDS = (1000, 9000)
"""That every vocabulary has and no template gives a meaning."""


def random_tokens(count: int) -> list[int]:
    """That no cache knows."""
    choose = random.SystemRandom()
    return [choose.randrange(*_TOKEN_IDS) for _ in range(count)]


def host_curves(servers: Sequence[server.Server]) -> dict[str, Curve]:
    """Seconds until a prefix of each length that host memory has is restored, in either way.

    Args:
        servers: named by :data:`WAYS`, with a host tier and :data:`POOL` tokens.
    """
    found: dict[str, Curve] = {one.system.name: {} for one in servers}
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
    prompts = [random_tokens(length) for _ in range(max(POOL // length + 2, _SAMPLES))]
    seconds: list[list[float]] = [[] for _ in servers]
    for again in (False, True):
        for number, prompt in enumerate(prompts):
            for turn in range(len(servers)):
                at = (number + turn) % len(servers)
                begin = time.monotonic()
                generate(servers[at].url, [*prompt, *random_tokens(1)], 1)
                if again:
                    seconds[at].append(time.monotonic() - begin)
    return [statistics.median(each) for each in seconds]
