"""Client that has a running server store a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import requests

from sgl_ext.client import refusal, result_of
from sgl_ext.errors import ExtError

_CONNECT_S = 10.0
_SILENCE_S = 3600.0
"""Longest time between two events, in seconds: the server's own deadline for a context."""


def store(
    url: str,
    context: str | Sequence[int],
    *,
    api_key: str | None = None,
    cache_salt: str | None = None,
    base: str | None = None,
    tell: Callable[[str], None] = lambda _progress: None,
) -> dict[str, Any]:
    """Has the server at ``url`` store a context, and returns its description.

    Args:
        context: its text, or its token ids.
        api_key: API key of the server, if it has one.
        cache_salt: salt of the tenant.
        base: id of the stored context that this one continues, if any.
        tell: called with the progress: ``waiting``, ``computing 4096/65536`` (tokens),
            ``layer 3/30``.

    Raises:
        ExtError: the server does not answer, or it cannot store the context.
    """
    route = f"{url.rstrip('/')}/ext/clusters"
    body: dict[str, Any] = {"stream": True}
    if isinstance(context, str):
        body["text"] = context
    else:
        body["input_ids"] = [*context]
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if base is not None:
        body["base"] = base
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with requests.post(
            route, json=body, headers=headers, stream=True, timeout=(_CONNECT_S, _SILENCE_S)
        ) as answer:
            if not answer.ok:
                raise refusal(route, answer, "clusters")
            return result_of(answer, tell)
    except requests.RequestException as error:
        raise ExtError(f"no answer from {route}: {error}; is a server running there?") from None
