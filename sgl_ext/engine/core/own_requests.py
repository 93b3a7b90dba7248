"""Requests that the extension itself makes of its server, in the process of SGLang's tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.errors import ExtError


class OwnRequests:
    """Those that are under way.

    Args:
        manager: SGLang's ``TokenizerManager``.
        what: is computed by them, for errors.
    """

    def __init__(self, manager: TokenizerManager, what: str) -> None:
        self._manager, self._what = manager, what
        self._asking: set[int] = set()

    def __contains__(self, request: Any) -> bool:
        return id(request) in self._asking

    async def answer(self, request: Any) -> dict[str, Any]:
        """The whole answer to SGLang's ``GenerateReqInput``.

        Raises:
            ExtError: the server does not compute it.
        """
        answer: dict[str, Any] = {}
        self._asking.add(id(request))
        try:
            async for answer in self._manager.generate_request(request):
                reason = answer["meta_info"]["finish_reason"] or {}
                if reason.get("type") == "abort":
                    raise ExtError(f"{self._what} was not computed: {reason.get('message')}")
        except asyncio.CancelledError:
            # SGLang computes on for a caller that has gone.
            if request.rid:
                self._manager.abort_request(request.rid)
            raise
        except ValueError as error:  # SGLang's word for what it does not take
            raise ExtError(f"{self._what} was not computed: {error}") from None
        finally:
            self._asking.discard(id(request))
        return answer
