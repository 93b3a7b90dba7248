"""Reports of the powers in OpenAI responses: ``sglext.ext``, beside SGLang's own extensions.

SGLang copies named fields of ``meta_info`` into the response, and offers no place to add others.
The response therefore gets its report on its way out: a stream in the chunk that ends a choice,
because clients expect a choice in every chunk but that of the usage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_ext.engine.core.power import Answer

PATHS = ("/v1/chat/completions", "/v1/completions", "/invocations")
_KEY = "sgl_ext_reports"
"""Key of the reports in the state of an HTTP request, which SGLang passes to its manager."""
_EVENT, _END = b"data: {", b"\n\n"
_DETAILS = b'"cached_tokens_details"'
_ENDED = re.compile(rb'"finish_reason":\s*"')


@dataclass
class Reports:
    """Reports on the answers to one HTTP request."""

    entries: dict[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Entries on each choice, by its index; choices without entries are left out."""
    details: Mapping[str, Any] | None = None
    """Cached tokens of the prompt by their source. SGLang's own response omits sources that it does
    not know."""


def keep(request: object, answer: Answer) -> None:
    """Keeps the entries of an answer for the response to its HTTP request.

    Args:
        request: the HTTP request; others, and requests of other paths, are ignored.
    """
    state = request.scope.get("state", {}) if isinstance(request, Request) else {}
    reports: Reports | None = state.get(_KEY)
    if reports is None:
        return
    for at, each in enumerate(answer if isinstance(answer, list) else [answer]):
        meta = each["meta_info"]
        if entries := meta.get("ext"):
            reports.entries[each.get("index", at)] = entries
        reports.details = reports.details or meta.get("cached_tokens_details")


class OpenaiReports:
    """ASGI middleware that adds the reports of a request to its response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) not in PATHS:
            await self._app(scope, receive, send)
            return
        reports = Reports()
        scope.setdefault("state", {})[_KEY] = reports
        start: Message | None = None
        """Start of the response, held back because its body may become longer."""
        body, stream = b"", False

        async def sending(message: Message) -> None:
            nonlocal start, body, stream
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                plain = "content-encoding" not in headers
                stream = plain and _is(headers, "text/event-stream")
                if plain and _is(headers, "application/json"):
                    start = message
                else:
                    await send(message)
            elif message["type"] != "http.response.body":
                await send(message)
            elif start is None:
                if stream:
                    message = {**message, "body": _in_stream(message.get("body", b""), reports)}
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    body = _in_body(body, reports)
                    headers = MutableHeaders(raw=[*start["headers"]])
                    headers["content-length"] = str(len(body))
                    await send({**start, "headers": headers.raw})
                    await send({**message, "body": body})

        await self._app(scope, receive, sending)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is(headers: Headers, kind: str) -> bool:
    return headers.get("content-type", "").startswith(kind)


def _in_body(body: bytes, reports: Reports) -> bytes:
    """Returns a whole response with the entries on all choices."""
    if not reports.entries and _DETAILS not in body:
        return body
    found = orjson.loads(body)
    if not isinstance(found, dict) or "choices" not in found:  # an error
        return body
    several = len(found["choices"]) > 1
    entries = [
        {"index": index, **entry} if several else entry
        for index, each in sorted(reports.entries.items())
        for entry in each
    ]
    return _with(found, entries, reports)


def _in_stream(body: bytes, reports: Reports) -> bytes:
    """Returns a part of a stream; each chunk that ends a choice has the entries on it."""
    if not (reports.entries and _ENDED.search(body)) and _DETAILS not in body:
        return body
    return _END.join(_in_chunk(event, reports) for event in body.split(_END))


def _in_chunk(event: bytes, reports: Reports) -> bytes:
    if not event.startswith(_EVENT) or not (_ENDED.search(event) or _DETAILS in event):
        return event
    found = orjson.loads(event[len(_EVENT) - 1 :])
    ended = [each["index"] for each in found.get("choices", ()) if each.get("finish_reason")]
    entries = [entry for index in ended for entry in reports.entries.get(index, ())]
    if not entries and "sglext" not in found:
        return event
    return _EVENT[:-1] + _with(found, entries, reports)


def _with(response: dict[str, Any], entries: Sequence[Mapping[str, Any]], of: Reports) -> bytes:
    known: dict[str, Any] = response.get("sglext") or {}
    if known.get("cached_tokens_details") and of.details:
        known["cached_tokens_details"] = of.details
    if entries:
        known["ext"] = entries
    if known:
        response["sglext"] = known
    return orjson.dumps(response)
