"""Server-sent events of long work: its progress, then its result or its error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

import msgspec

from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Function that work calls with its progress."""


async def events(work: Callable[[Tell], Awaitable[object]]) -> AsyncIterator[bytes]:
    """Runs work and yields ``{"progress": …}`` for each progress, then its result.

    Instead of a result, the last event may be ``{"error": {"message", "code"}}``. The work is
    cancelled if the events are not read any more, because the client has disconnected.

    Args:
        work: function that returns the work; its result is encoded as JSON.
    """
    told: asyncio.Queue[str | None] = asyncio.Queue()
    task = asyncio.ensure_future(work(told.put_nowait))
    task.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (progress := await told.get()) is not None:
            yield _event({"progress": progress})
        try:
            yield _event(await task)
        except ExtError as error:
            yield _event({"error": {"message": str(error), "code": int(error.status)}})
        except Exception:  # the status is sent already, so the client must learn it here
            logger.exception("a request with progress has failed")
            message = "the server has failed; see its log"
            yield _event({"error": {"message": message, "code": HTTPStatus.INTERNAL_SERVER_ERROR}})
    finally:
        task.cancel()


def _event(data: object) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
