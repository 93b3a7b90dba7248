"""Requests that the extension sends to its own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.core.own_requests import OwnRequests, is_own


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
