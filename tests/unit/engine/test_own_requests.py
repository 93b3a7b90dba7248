"""Requests that the extension sends to its own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sgl_ext.engine.core.own_requests import AbortedError, OwnRequests, is_own
from sgl_ext.errors import ExtError


def test_cancelled_request_is_aborted() -> None:
    aborted: list[str] = []

    class Manager:
        async def generate_request(self, request: Any) -> AsyncIterator[Any]:
            request.rid = "named by SGLang"
            await asyncio.Event().wait()
            yield {}

        def abort_request(self, rid: str) -> None:
            aborted.append(rid)

    async def run() -> None:
        manager: Any = Manager()
        requests = OwnRequests(manager, "a chunk")
        OwnRequests(manager, "a context")  # fronts of all powers know each other's requests
        request = SimpleNamespace(rid=None)
        answer = asyncio.create_task(requests.answer(request))
        while request.rid is None:
            await asyncio.sleep(0)
        assert is_own(manager, request)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert not is_own(manager, request)

    asyncio.run(run())
    assert aborted == ["named by SGLang"]


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("The request queue is full.", True),
        ("The request is aborted by a higher priority request.", True),
        ("a part of the record is damaged", False),
    ],
)
def test_a_request_may_be_sent_again_if_the_server_was_busy(message: str, again: bool) -> None:
    class Manager:
        async def generate_request(self, request: Any) -> AsyncIterator[Any]:
            raise HTTPException(503, message)
            yield request

    manager: Any = Manager()
    request: Any = SimpleNamespace(rid=None)
    with pytest.raises(ExtError, match=f"a chunk was not computed: {message}") as raised:
        asyncio.run(OwnRequests(manager, "a chunk").answer(request))
    assert isinstance(raised.value, AbortedError) is again
    assert raised.value.status == (503 if again else 400)
