"""HTTP session of clients that send many requests at once."""

from __future__ import annotations

import aiohttp

_BUFFERED = 1 << 22
"""Bytes of an answer that are buffered: a line may have the log-probabilities of a long prompt."""


def session(deadline: float | None = None) -> aiohttp.ClientSession:
    """Returns a session that uses each connection once, because a server may close idle ones.

    Args:
        deadline: longest duration of a request, in seconds.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=deadline),
        read_bufsize=_BUFFERED,
    )
