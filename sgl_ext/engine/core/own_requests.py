"""Requests that the extension sends to its own server, in the process of SGLang's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from sgl_ext.engine.core.sglang_types import GenerateReqInput, TokenizerManager
from sgl_ext.errors import ExtError

T = TypeVar("T")

_BUSY = ("The request queue is full", "The request is aborted by a higher priority request")
"""Beginnings of the messages of requests that SGLang rejects because of its load. A request that
fails for another reason, such as a damaged record, has the same status."""

_ASKING = "_ext_asking"
"""Attribute of SGLang's ``TokenizerManager``: ``id()`` of the extension's requests in progress."""


def is_own(manager: TokenizerManager, request: object) -> bool:
    """Returns whether a request in progress is one of the extension's, and not of a user."""
    return id(request) in getattr(manager, _ASKING, ())


class AbortedError(ExtError):
    """Error for a request that was aborted before it was computed; another one may succeed."""


class OverloadedError(AbortedError):
    """Error for a request that the server has rejected because of its load."""

    status = 503


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of concurrent work, in its order; cancels the rest if one part fails."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class OwnRequests:
    """Requests of the extension for one kind of result.

    Args:
        manager: SGLang's ``TokenizerManager``.
        what: name of the result that the requests compute, for error messages.
    """

    def __init__(self, manager: TokenizerManager, what: str) -> None:
        self._manager, self._what = manager, what
        if not hasattr(manager, _ASKING):
            setattr(manager, _ASKING, set())
        self._asking: set[int] = getattr(manager, _ASKING)

    async def answer(self, request: GenerateReqInput) -> dict[str, Any]:
        """Returns the complete answer to SGLang's ``GenerateReqInput``.

        Raises:
            AbortedError: the request was aborted, for example by ``/abort_request``.
            OverloadedError: the server has too much load.
            ExtError: the server rejects the request, or cannot compute it.
        """
        from fastapi import HTTPException

        answer: dict[str, Any] = {}
        self._asking.add(id(request))
        try:
            async for answer in self._manager.generate_request(request):
                reason = answer["meta_info"]["finish_reason"] or {}
                if reason.get("type") == "abort":
                    raise AbortedError(f"{self._what} was not computed: {reason.get('message')}")
        except asyncio.CancelledError:
            # SGLang goes on computing after its caller was cancelled.
            if request.rid:
                self._manager.abort_request(request.rid)
            raise
        except ValueError as error:  # SGLang raises it for an invalid request
            raise ExtError(f"{self._what} was not computed: {error}") from None
        except HTTPException as error:  # and this one for an aborted request with a status
            if str(error.detail).startswith(_BUSY):
                raise OverloadedError(
                    f"{self._what} was not computed: {error.detail} Try again later, or raise "
                    "--max-queued-requests"
                ) from None
            raise ExtError(f"{self._what} was not computed: {error.detail}") from None
        finally:
            self._asking.discard(id(request))
        return answer
