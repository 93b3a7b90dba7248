"""Middleware that rewrites bodies of requests before SGLang's own routes read them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import orjson
from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_ext.engine.front.errors import refusal
from sgl_ext.errors import ExtError

_LARGEST_BODY = 64 << 20


class TooLargeError(ExtError):
    """Error for a body that cannot be read as a whole, and may not be passed on as it is."""

    status = 413


class Bodies(ABC):
    """ASGI middleware for JSON objects that are sent to some routes.

    Args:
        app: ASGI application behind the middleware.
    """

    paths: ClassVar[frozenset[str]]
    """Paths of the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @abstractmethod
    def concerns(self, path: str, body: bytes) -> bool:
        """Returns whether a body has to be read: others are passed on as they are."""

    @abstractmethod
    def needs(self, body: bytes) -> bool:
        """Returns whether SGLang would ignore a part of this body if it were not read here."""

    @abstractmethod
    def rewrite(self, path: str, request: dict[str, Any]) -> None:
        """Changes a request in place.

        Raises:
            ExtError: the request is refused.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in self.paths:
            await self._app(scope, receive, send)
            return
        messages, body, whole = await read(receive)
        if self.concerns(path, body) if whole else self.needs(body):
            try:
                if not whole:
                    raise TooLargeError(
                        f"a body of more than {_LARGEST_BODY >> 20} MiB cannot name contexts; send "
                        "fewer prompts at once"
                    )
                body = self._rewritten(path, body)
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

    def _rewritten(self, path: str, body: bytes) -> bytes:
        """Returns the body as it is passed on: unchanged if it is no object."""
        dump: Callable[[Any], bytes] = orjson.dumps
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError:
            try:  # SGLang also accepts NaN and lone surrogates
                request, dump = json.loads(body), lambda found: json.dumps(found).encode()
            except ValueError:
                return body
        if not isinstance(request, dict):
            return body
        self.rewrite(path, request)
        return dump(request)


def object_of(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a copy of an object in a request; an empty one if it is not given.

    Raises:
        ExtError: it is no object.
    """
    found = request.get(name)
    if found is not None and not isinstance(found, dict):
        raise ExtError(f"{name} must be an object, found {found!r:.200}")
    return {**(found or {})}


def add_innermost(app: FastAPI, middleware: type[Bodies], **options: Any) -> None:
    """Adds a middleware behind all others, before the server starts.

    Those of SGLang decompress bodies, and answer for other origins.
    """
    app.user_middleware.append(Middleware(middleware, **options))  # type: ignore[arg-type]


async def read(receive: Receive) -> tuple[list[Message], bytes, bool]:
    """Returns the messages of a request body, the body, and whether it is whole.

    Stops when more than :data:`_LARGEST_BODY` bytes have come and more follow.
    """
    messages, body = [], bytearray()
    while True:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if not message.get("more_body"):
            return messages, bytes(body), True
        if len(body) > _LARGEST_BODY:
            return messages, bytes(body), False
