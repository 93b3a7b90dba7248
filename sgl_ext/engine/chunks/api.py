"""HTTP routes ``/ext/chunks`` of a server's contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from sgl_ext.chunks.contexts import Context
from sgl_ext.chunks.split import Split
from sgl_ext.config import Chunks
from sgl_ext.engine.chunks.middleware import Parts
from sgl_ext.engine.chunks.service import ContextService
from sgl_ext.engine.front.bodies import add_innermost
from sgl_ext.engine.front.client_gone import while_connected
from sgl_ext.engine.front.events import Tell, events
from sgl_ext.engine.front.text import Text
from sgl_ext.errors import ExtError

_MOST = 1024
"""Maximum number of chunks that one request creates, after they are split."""
_LARGEST = 1 << 22
"""Maximum number of characters of the texts of one request, the prefix included."""


class CreateContexts(BaseModel):
    """Body of ``POST /ext/chunks``."""

    model_config = ConfigDict(extra="forbid")

    chunks: Annotated[list[Text | list[StrictInt]], Field(min_length=1, max_length=_MOST)]
    """Chunks to create contexts of, each a text or token ids."""
    method: Text | None = None
    """Name of the link method; if None, :meth:`ContextService.create` chooses it."""
    split: Split = Split()
    """Split that is applied to each chunk first; each part becomes a context."""
    prefix: Text | None = None
    """Text that the prompts that link the contexts begin with, such as the system prompt."""
    ttl: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Seconds until the contexts expire; if None, they never expire."""
    stream: bool = False
    """True to stream the progress as server-sent events before the contexts."""
    cache_salt: Text | None = None
    """Salt of the tenant; other tenants have no access to the contexts."""


def _untold(_done: int, _of: int) -> None:
    """Progress that nobody asked for."""


async def created(
    service: ContextService, body: CreateContexts, tell: Callable[[int, int], None] = _untold
) -> list[Context]:
    """Splits the chunks of a request, and creates and returns their contexts.

    Args:
        tell: called with the number of chunks that are computed, and of all.

    Raises:
        ExtError: the texts are too long in all; see also :meth:`ContextService.create` and
            :meth:`ContextService.split`.
    """
    texts = [text for text in (*body.chunks, body.prefix) if isinstance(text, str)]
    if (size := sum(map(len, texts))) > _LARGEST:
        raise ExtError(
            f"the texts have {size} characters, but a request may have at most {_LARGEST}; create "
            "the contexts in several requests"
        )
    parts = await service.split(
        body.chunks, body.split, _MOST, method=body.method, prefix=body.prefix
    )
    return await service.create(
        parts,
        method=body.method,
        prefix=body.prefix,
        ttl=body.ttl,
        salt=body.cache_salt,
        tell=tell,
    )


def router(service: ContextService) -> APIRouter:
    """Returns the router of the context cache."""
    from sglang.srt.entrypoints.http_server import ORJSONRoute

    # SGLang's route class parses bodies with orjson, which rejects lone surrogates. Validation
    # errors quote the values that they reject. Ids are paths, because they may contain an encoded
    # "/", which the server decodes before it looks up the route.
    routes = APIRouter(prefix="/ext/chunks", route_class=ORJSONRoute)

    def told(context: Context) -> dict[str, object]:
        return msgspec.structs.asdict(service.describe(context))

    def warned(answer: dict[str, object]) -> dict[str, object]:
        warning = service.warning
        return answer if warning is None else {**answer, "warning": warning}

    def made(contexts: Sequence[Context]) -> dict[str, object]:
        return warned({"contexts": [*map(told, contexts)]})

    @routes.post("")
    @routes.post("/", include_in_schema=False)  # not the routes of the empty id
    async def create(body: CreateContexts, request: Request) -> Any:
        if body.stream:

            async def work(tell: Tell) -> object:
                return made(await created(service, body, lambda done, of: tell(f"{done}/{of}")))

            return StreamingResponse(events(work), media_type="text/event-stream")
        return made(await while_connected(request, created(service, body)))

    @routes.get("/list")
    async def every(cache_salt: str | None = None) -> dict[str, object]:
        return {"contexts": [*map(told, service.contexts.all(cache_salt))]}

    @routes.get("/fidelity")
    async def fidelity() -> dict[str, object]:
        found = service.fidelity
        return {"method": service.method, "nats": None if found is None else asdict(found)}

    @routes.get("/{id_:path}")
    async def one(id_: str, cache_salt: str | None = None) -> dict[str, object]:
        return told(service.contexts.get(id_, cache_salt))

    @routes.delete("/{id_:path}")
    async def delete(id_: str, cache_salt: str | None = None) -> dict[str, object]:
        await service.delete(id_, cache_salt)
        return {"deleted": id_}

    @routes.post("/{id_:path}/pin")
    async def pin(id_: str, cache_salt: str | None = None) -> dict[str, object]:
        return warned(told(await service.pin(id_, cache_salt, pinned=True)))

    @routes.post("/{id_:path}/unpin")
    async def unpin(id_: str, cache_salt: str | None = None) -> dict[str, object]:
        return told(await service.pin(id_, cache_salt, pinned=False))

    return routes


def install(app: FastAPI, service: ContextService, config: Chunks) -> None:
    """Adds the routes and the middleware to SGLang's HTTP server before the server starts."""
    app.include_router(router(service))
    add_innermost(app, Parts, contexts=service.contexts, automatic=config.automatic)
