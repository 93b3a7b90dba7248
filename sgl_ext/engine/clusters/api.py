"""HTTP routes ``/ext/clusters`` of a server's stored contexts."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from sgl_ext.engine.clusters.service import StoredService
from sgl_ext.engine.front.client_gone import while_connected
from sgl_ext.engine.front.events import Tell, events
from sgl_ext.engine.front.text import Text


class StoreContext(BaseModel):
    """Body of ``POST /ext/clusters``."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[Text, Field(min_length=1)] | None = None
    """Text of the context, from the first token of the prompt on."""
    input_ids: Annotated[list[StrictInt], Field(min_length=1)] | None = None
    """Token ids of the context, instead of its text."""
    base: Annotated[Text, Field(max_length=256)] | None = None
    """Id of the stored context that the text continues; the new context has the tokens of both."""
    record_only: bool = False
    """True to only record the context in a file, from which ``sgl-ext cluster`` stores it."""
    stream: bool = False
    """True to stream the progress as server-sent events before the context."""
    cache_salt: Annotated[Text, Field(max_length=1 << 16)] | None = None
    """Salt of the tenant; other tenants cannot use, see or delete the context."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give exactly one of text and input_ids")
        if self.stream and self.record_only:
            raise ValueError("a record has no progress to stream; omit stream or record_only")
        if self.base is not None and self.record_only:
            raise ValueError("a context is continued where it is stored; omit base or record_only")
        return self


def install(app: FastAPI, service: StoredService) -> None:
    """Adds the routes to SGLang's HTTP server before the server starts."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from sgl_ext.engine.front.routes import ExtRoute, add_routes

    routes = APIRouter(prefix="/ext/clusters", route_class=ExtRoute)

    @routes.post("")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def create(body: StoreContext, request: Request) -> Any:
        context, salt, base = body.text or body.input_ids or "", body.cache_salt, body.base
        if body.stream:

            async def work(tell: Tell) -> object:
                tell("waiting")
                id_ = await service.creation.create(context, salt, tell, base)
                return msgspec.structs.asdict(await asyncio.to_thread(service.describe, id_, salt))

            return StreamingResponse(events(work), media_type="text/event-stream")
        if body.record_only:
            return {
                "record": str(
                    await while_connected(request, service.creation.record(context, salt))
                )
            }
        id_ = await while_connected(request, service.creation.create(context, salt, base=base))
        return msgspec.structs.asdict(await asyncio.to_thread(service.describe, id_, salt))

    # Not async: the handlers read files, so FastAPI runs them in threads.
    @routes.get("/list")
    def every(cache_salt: str | None = None) -> dict[str, object]:
        found, unreadable, damaged = service.all(cache_salt)
        return {
            "contexts": [*map(msgspec.structs.asdict, found)],
            "unreadable": unreadable,
            "damaged": damaged,
            "storing": service.creation.progress(cache_salt),
        }

    @routes.get("/{id_}")
    def one(id_: str, cache_salt: str | None = None) -> dict[str, object]:
        return msgspec.structs.asdict(service.describe(id_, cache_salt))

    @routes.delete("/{id_}")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    def delete(id_: str, cache_salt: str | None = None) -> dict[str, object]:
        service.delete(id_, cache_salt)
        return {"deleted": id_}

    add_routes(app, routes)
