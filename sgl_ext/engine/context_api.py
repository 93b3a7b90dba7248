"""``/ext/context_cache``, and contexts within the bodies of SGLang's own routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_ext.chunks.compose import mark
from sgl_ext.chunks.contexts import Context, Contexts, UnknownContextError
from sgl_ext.chunks.split import Split
from sgl_ext.config import Chunks
from sgl_ext.engine.context_service import MARKED, ContextService
from sgl_ext.errors import ExtError

_PART = "ext_context"
"""Type of the part of a message, or of a prompt, that names a context."""
_PATHS = frozenset({"/generate", "/v1/chat/completions"})
_LARGEST_BODY = 64 << 20
_MOST = 1024
"""Chunks that are created at once."""


class CreateContexts(BaseModel):
    """What ``POST /ext/context_cache`` takes."""

    model_config = ConfigDict(extra="forbid")

    chunks: Annotated[list[str | list[int]], Field(min_length=1, max_length=_MOST)]
    """Each a text, or its token ids."""
    method: str | None = None
    """Name of the link method; the server's default without it."""
    split: Split = Split()
    """How each chunk is split first; there is a context of each part then."""
    prefix: str | None = None
    """What prompts that link them begin with, such as the system prompt."""
    ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds until they expire; never without it."""
    cache_salt: str | None = None
    """Keeps them apart from those of other tenants."""


async def created(service: ContextService, body: CreateContexts) -> list[Context]:
    """The contexts that are asked for.

    Raises:
        ExtError: see :meth:`ContextService.create` and :meth:`ContextService.parts`.
    """
    parts = await service.parts(body.chunks, body.split)
    if len(parts) > _MOST:
        raise ExtError(f"these are {len(parts)} chunks; create at most {_MOST} at once")
    return await service.create(
        parts,
        method=body.method,
        prefix=body.prefix,
        ttl=body.ttl,
        salt=body.cache_salt,
    )


def router(service: ContextService) -> APIRouter:
    """The routes of the context cache."""
    routes = APIRouter(prefix="/ext/context_cache")

    def told(context: Context) -> dict[str, Any]:
        return msgspec.structs.asdict(service.describe(context))

    @routes.post("")
    async def create(body: CreateContexts) -> dict[str, Any]:
        return {"contexts": [*map(told, await created(service, body))]}

    @routes.get("/list")
    async def every(cache_salt: str | None = None) -> dict[str, Any]:
        return {"contexts": [*map(told, service.contexts.all(cache_salt))]}

    @routes.get("/fidelity")
    async def fidelity() -> dict[str, Any]:
        found = service.fidelity
        return {"method": service.method, "nats": None if found is None else asdict(found)}

    @routes.get("/{id_}")
    async def one(id_: str, cache_salt: str | None = None) -> dict[str, Any]:
        return told(service.contexts.get(id_, cache_salt))

    @routes.delete("/{id_}")
    async def delete(id_: str, cache_salt: str | None = None) -> dict[str, Any]:
        service.contexts.delete(id_, cache_salt)
        return {"deleted": id_}

    return routes


def install(app: FastAPI, service: ContextService, config: Chunks) -> None:
    """Adds all of it to SGLang's HTTP server, before that is started."""
    app.include_router(router(service))
    app.add_exception_handler(ExtError, _refused)
    app.add_middleware(Parts, contexts=service.contexts, automatic=config.automatic)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    code = error.status if isinstance(error, ExtError) else 400
    return JSONResponse({"error": {"message": str(error), "code": code}}, code)


class Parts:
    """ASGI middleware: parts that name a context become marks in the text, which SGLang takes.

    SGLang's own schema knows a fixed set of parts. In ``/generate`` the ``text`` may be a list of
    parts as in a chat message.

    Args:
        automatic: whether a part whose text is a context's stands for it, too.
    """

    def __init__(self, app: ASGIApp, contexts: Contexts, automatic: bool) -> None:
        self._app = app
        self._contexts = contexts
        self._automatic = automatic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        messages, body = await _read(receive)
        parts = b'"type"' in body and (self._automatic or scope["path"] == "/generate")
        if parts or f'"{_PART}"'.encode() in body:
            try:
                body = self._marked(body)
            except UnknownContextError as error:
                await (await _refused(Request(scope), error))(scope, receive, send)
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
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError:
            return body  # SGLang says what is wrong with it
        if not isinstance(request, dict):
            return body
        salt = request.get("cache_salt")
        messages = request.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
                marks = [self._mark(part, salt) for part in parts]
                message["content"] = [
                    part if mark is None else {"type": "text", "text": mark}
                    for part, mark in zip(parts, marks, strict=True)
                ]
                if any(marks):  # SGLang tokenises chats before anybody can look at them
                    request["custom_params"] = {
                        **(request.get("custom_params") or {}),
                        MARKED: True,
                    }
        if isinstance(parts := request.get("text"), list) and any(map(_is_part, parts)):
            request["text"] = "".join(self._mark(part, salt) or _text(part) for part in parts)
        return orjson.dumps(request)

    def _mark(self, part: Any, salt: Any) -> str | None:
        """What stands for a part that is a context; raises UnknownContextError if there is none."""
        if not _is_part(part):
            return None
        if part["type"] == _PART:
            return mark(self._contexts.get(str(part.get("id")), salt).id)
        if not self._automatic or not isinstance(text := part.get("text"), str):
            return None
        found = self._contexts.find(text, salt)
        return None if found is None else mark(found.id)


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and "type" in part


def _text(part: Any) -> str:
    return part["text"] if _is_part(part) and "text" in part else str(part)


async def _read(receive: Receive) -> tuple[list[Message], bytes]:
    """The messages of a body, up to its end or to the size from which on it is left alone."""
    messages, body = [], bytearray()
    while True:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if not message.get("more_body") or len(body) > _LARGEST_BODY:
            return messages, bytes(body)
