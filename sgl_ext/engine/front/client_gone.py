"""Cancellation of work whose client has disconnected, which SGLang's server would continue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from sgl_ext.errors import ExtError

LOOK_S = 0.5
"""Time between two checks of the connection, in seconds."""

T = TypeVar("T")


class ClientGoneError(ExtError):
    """Error raised when the client has closed its connection."""

    status = 499


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``, and cancels it if the client disconnects.

    Raises:
        ClientGoneError: the client has disconnected.
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
