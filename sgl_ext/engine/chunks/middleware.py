"""Middleware for contexts in the bodies of SGLang's own routes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TypeGuard

import orjson
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_ext.chunks.contexts import Contexts
from sgl_ext.engine.chunks.parameters import MARKED
from sgl_ext.engine.front.errors import refusal
from sgl_ext.errors import ExtError
from sgl_ext.marks import ids_in, mark

_PART = "ext_context"
"""Type of a part of a message or of a prompt that names a context."""
_SIGNS = (f'"{_PART}"'.encode(), mark("")[0].encode(), rb"\ue0c0", rb"\uE0C0")
"""Byte strings of which every body that names a context has at least one, also if the user has
written marks."""
_PATHS = frozenset({"/generate", "/v1/chat/completions", "/invocations"})
_LARGEST_BODY = 64 << 20


class Parts:
    """ASGI middleware that replaces parts that name a context by marks in the text.

    SGLang's schema accepts a fixed set of part types, and marks are text to it. In ``/generate``,
    ``text`` may be a list of parts, as in a chat message, and of strings.

    Args:
        app: ASGI application behind the middleware.
        contexts: registry of the contexts.
        automatic: whether a part whose text is that of a context is replaced, too.
    """

    def __init__(self, app: ASGIApp, contexts: Contexts, automatic: bool) -> None:
        self._app = app
        self._contexts = contexts
        self._automatic = automatic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in _PATHS:
            await self._app(scope, receive, send)
            return
        messages, body = await _read(receive)
        parts = b'"type"' in body and (self._automatic or path == "/generate")
        if parts or any(sign in body for sign in _SIGNS):
            try:
                body = self._marked(body)
            except (ExtError, RecursionError, orjson.JSONEncodeError) as error:
                if not isinstance(error, ExtError):
                    error = ExtError("the request is nested too deeply; use fewer than 250 levels")
                await (await refusal(Request(scope), error))(scope, receive, send)
                return
            length = (b"content-length", str(len(body)).encode())
            headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            scope = {**scope, "headers": [*headers, length]}
            messages = [{"type": "http.request", "body": body, "more_body": False}]
        waiting = iter(messages)

        async def replay() -> Message:
            return next(waiting, None) or await receive()

        await self._app(scope, replay, send)

    def _marked(self, body: bytes) -> bytes:
        """Returns the body with marks in place of the parts that name contexts.

        Raises:
            ExtError: a context does not exist, or a part or a field is malformed.
        """
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError:
            return body  # SGLang reports the error
        if not isinstance(request, dict):
            return body
        salt = request.get("cache_salt")
        messages = request.get("messages")
        names = False
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                content = message.get("content")
                if isinstance(content, list):
                    message["content"] = content = [self._chat_part(each, salt) for each in content]
                for id_ in chain.from_iterable(map(ids_in, _texts(content))):
                    self._contexts.get(id_, _salt(salt))  # SGLang would report another error
                    names = True
        if names:  # SGLang tokenizes a chat before the context service sees it
            request["custom_params"] = {**_object(request, "custom_params"), MARKED: True}
        if isinstance(parts := request.get("text"), list) and any(map(_is_part, parts)):
            request["text"] = "".join(self._text(part, salt) for part in parts)
        return orjson.dumps(request)

    def _chat_part(self, part: object, salt: object) -> object:
        mark = self._mark(part, salt)
        return part if mark is None else {"type": "text", "text": mark}

    def _text(self, part: object, salt: object) -> str:
        """Returns the text that a part of a ``/generate`` prompt stands for."""
        found: object = part if isinstance(part, str) else self._mark(part, salt)
        if found is None and _is_part(part) and part["type"] == "text":
            found = part.get("text")
        if not isinstance(found, str):
            raise ExtError(
                "a part of text must be a string, {'type': 'text', 'text': …} or {'type': "
                f"'{_PART}', 'id': …}}, found {part!r:.200}"
            )
        return found

    def _mark(self, part: object, salt: object) -> str | None:
        """Returns the mark that replaces a part; None if the part is not a context.

        Raises:
            ExtError: the context does not exist, or its id is not a string.
        """
        if not _is_part(part):
            return None
        if part["type"] == _PART:
            if not isinstance(id_ := part.get("id"), str):
                raise ExtError(f"the id of a context must be a string, found {id_!r:.200}")
            return mark(self._contexts.get(id_, _salt(salt)).id)
        if not self._automatic or not isinstance(text := part.get("text"), str):
            return None
        found = self._contexts.find(text, _salt(salt))
        return None if found is None else mark(found.id)


def _is_part(part: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(part, Mapping) and "type" in part


def _texts(content: object) -> list[str]:
    """Returns the texts in the content of a message."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _salt(found: object) -> str | None:
    if found is not None and not isinstance(found, str):
        raise ExtError(
            f"the cache_salt of a prompt with contexts must be a string, found {found!r:.200}"
        )
    return found


def _object(request: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = request.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ExtError(f"{name} must be an object, found {found!r:.200}")
    return found or {}


async def _read(receive: Receive) -> tuple[list[Message], bytes]:
    """Returns the messages of a request body, and the body.

    Stops when more than :data:`_LARGEST_BODY` bytes have come and more follow; the returned body is
    then empty, so that the request is passed on unchanged.
    """
    messages, body = [], bytearray()
    while True:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if not message.get("more_body"):
            return messages, bytes(body)
        if len(body) > _LARGEST_BODY:
            return messages, b""
