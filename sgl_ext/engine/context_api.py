"""``/ext/context_cache``, and contexts within the bodies of SGLang's own routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_ext.chunks.compose import mark
from sgl_ext.chunks.contexts import Context, UnknownContextError
from sgl_ext.engine.context_service import ContextService
from sgl_ext.errors import ExtError

_PART = "ext_context"
"""Type of the part of a message, or of a prompt, that names a context."""
_PATHS = frozenset({"/generate", "/v1/chat/completions"})
_LARGEST_BODY = 64 << 20


class CreateContexts(BaseModel):
    """What ``POST /ext/context_cache`` takes."""

    model_config = ConfigDict(extra="forbid")

    chunks: Annotated[list[str | list[int]], Field(min_length=1, max_length=1024)]
    """Each a text, or its token ids."""
    method: str | None = None
    """Name of the link method; the server's default without it."""
    prefix: str | None = None
    """What prompts that link them begin with, such as the system prompt."""
    ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds until they expire; never without it."""
    cache_salt: str | None = None
    """Keeps them apart from those of other tenants."""


def router(service: ContextService, default_method: str) -> APIRouter:
    """The routes of the context cache."""
    routes = APIRouter(prefix="/ext/context_cache")

    @routes.post("")
    async def create(body: CreateContexts) -> dict[str, Any]:
        contexts = await service.create(
            body.chunks,
            method=body.method or default_method,
            prefix=body.prefix,
            ttl=body.ttl,
            salt=body.cache_salt,
        )
        return {"contexts": [_described(service, context) for context in contexts]}

    @routes.get("/list")
    async def every(cache_salt: str | None = None) -> dict[str, Any]:
        contexts = service.contexts.all(cache_salt)
        return {"contexts": [_described(service, context) for context in contexts]}

    @routes.get("/{id_}")
    async def one(id_: str, cache_salt: str | None = None) -> dict[str, Any]:
        return _described(service, service.contexts.get(id_, cache_salt))

    @routes.delete("/{id_}")
    async def delete(id_: str, cache_salt: str | None = None) -> dict[str, Any]:
        service.contexts.delete(id_, cache_salt)
        return {"deleted": id_}

    return routes


def install(app: FastAPI, service: ContextService, default_method: str) -> None:
    """Adds all of it to SGLang's HTTP server, before that is started."""
    app.include_router(router(service, default_method))
    app.add_exception_handler(ExtError, _refused)
    app.add_middleware(Parts)


def _described(service: ContextService, context: Context) -> dict[str, Any]:
    return {
        "id": context.id,
        "tokens": len(context.tokens),
        "bytes": len(context.tokens) * service.token_bytes,
        "method": context.method,
        "expires_in": service.expires_in(context),
    }


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    code = 404 if isinstance(error, UnknownContextError) else 400
    return JSONResponse({"error": {"message": str(error), "code": code}}, code)


class Parts:
    """ASGI middleware: parts that name a context become marks in the text, which SGLang takes.

    SGLang's own schema knows a fixed set of parts. In ``/generate`` the ``text`` may be a list of
    parts as in a chat message.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        messages, body = await _read(receive)
        if f'"{_PART}"'.encode() in body:
            body = _marked(body)
            length = (b"content-length", str(len(body)).encode())
            headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            scope = {**scope, "headers": [*headers, length]}
            messages = [{"type": "http.request", "body": body, "more_body": False}]
        waiting = iter(messages)

        async def replay() -> Message:
            return next(waiting, None) or await receive()

        await self._app(scope, replay, send)


async def _read(receive: Receive) -> tuple[list[Message], bytes]:
    """The messages of a body, up to its end or to the size from which on it is left alone."""
    messages, body = [], bytearray()
    while True:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if not message.get("more_body") or len(body) > _LARGEST_BODY:
            return messages, bytes(body)


def _marked(body: bytes) -> bytes:
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body  # SGLang says what is wrong with it
    if isinstance(request, dict):
        for message in _dicts(request.get("messages")):
            _replace(message, "content", lambda text: {"type": "text", "text": text})
        _replace(request, "text", str)
        if isinstance(parts := request.get("text"), list):
            request["text"] = "".join(
                part["text"] if isinstance(part, Mapping) and "text" in part else str(part)
                for part in parts
            )
    return orjson.dumps(request)


def _replace(holder: dict[str, Any], field: str, written: Callable[[str], Any]) -> None:
    parts = holder.get(field)
    if isinstance(parts, list):
        holder[field] = [
            written(mark(str(part.get("id"))))
            if isinstance(part, dict) and part.get("type") == _PART
            else part
            for part in parts
        ]


def _dicts(values: Any) -> list[dict[str, Any]]:
    return (
        [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    )
