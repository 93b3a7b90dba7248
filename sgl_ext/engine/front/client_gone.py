"""Ends the work for a client that has closed its connection, which SGLang's server goes on with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from sgl_ext.errors import ExtError

LOOK_S = 0.5
"""Seconds between two checks of the connection."""

T = TypeVar("T")


class ClientGoneError(ExtError):
    """The client has closed its connection."""

    status = 499


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns what ``work`` does, and cancels it when the client has gone.

    Raises:
        ClientGoneError: it has gone.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK_S)
            if not task.done() and await request.is_disconnected():
                raise ClientGoneError("the client has closed its connection")
        return task.result()
    finally:
        task.cancel()
