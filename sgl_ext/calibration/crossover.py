"""Measurement of L_delta, the crossover between restoring by layers and by tokens.

Prefixes in host memory of at least this length are restored by tokens (CacheFlow §3.1).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from sgl_ext.planning.profile import Curve
from sgl_ext.serving import server
from sgl_ext.serving.http import generate

_LENGTHS = (128, 256, 512, 1024)
"""Lengths of the measured prefixes, in tokens."""
POOL = 2048
"""Tokens of the device's KV pool: few, so that it soon evicts what it has computed."""
_SAMPLES = 10
_MARGIN = 1.03
"""Ratio of seconds up to which two strategies count as equally fast: the rest is noise."""
WAYS = ("tokens", "layers")
_TOKEN_IDS = (1000, 9000)
"""Range of token ids that every vocabulary has and that no template gives a meaning."""


def random_tokens(count: int) -> list[int]:
    """Returns ``count`` random token ids: a prompt that no cache holds."""
    choose = random.SystemRandom()
    return [choose.randrange(*_TOKEN_IDS) for _ in range(count)]


def host_curves(servers: Sequence[server.Server]) -> dict[str, Curve]:
    """Returns the seconds of requests whose prefix host memory holds, by strategy and length.

    Args:
        servers: Servers named by :data:`WAYS`, with a host tier and :data:`POOL` tokens on the
            device.
    """
    found: dict[str, Curve] = {one.system.name: {} for one in servers}
    for length in _LENGTHS:
        for one, seconds in zip(servers, _restored(servers, length), strict=True):
            found[one.system.name][length] = seconds
    return found


def crossover_of(tokens: Curve, layers: Curve) -> int:
    """Returns the length from which on restoring by ``tokens`` is not slower than by ``layers``.

    Differences within :data:`_MARGIN` do not count as slower.

    Args:
        tokens: Seconds by prefix length, restored by tokens.
        layers: Seconds of the same prefix lengths, restored by layers.
    """
    slower = [length for length, seconds in tokens.items() if seconds > _MARGIN * layers[length]]
    return max(slower, default=0) + 1


def _restored(servers: Sequence[server.Server], length: int) -> list[float]:
    """Returns each server's median seconds of prompts whose KV the device has evicted.

    All prompts are sent twice, and the second time is measured. Together they exceed :data:`POOL`.
    """
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
