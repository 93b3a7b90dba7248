"""``/ext/stored_contexts``: the routes of a server's contexts on devices."""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from sgl_ext.engine.clusters.service import StoredService
from sgl_ext.engine.front.client_gone import while_connected
from sgl_ext.engine.front.text import Text


class StoreContext(BaseModel):
    """What ``POST /ext/stored_contexts`` takes."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[Text, Field(min_length=1)] | None = None
    """The context, from the prompt's first token on."""
    input_ids: Annotated[list[StrictInt], Field(min_length=1)] | None = None
    """Its token ids, instead."""
    record_only: bool = False
    """Whether it is written into a file, for ``sgl-ext cluster`` to store it."""
    cache_salt: Annotated[Text, Field(max_length=1 << 16)] | None = None
    """Keeps it apart from those of other tenants."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids")
        return self


def install(app: FastAPI, service: StoredService) -> None:
    """Adds the routes to SGLang's HTTP server, before that is started."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from sgl_ext.engine.front.routes import ExtRoute, add_routes

    routes = APIRouter(prefix="/ext/stored_contexts", route_class=ExtRoute)

    @routes.post("")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def create(body: StoreContext, request: Request) -> dict[str, Any]:
        context, salt = body.text or body.input_ids or "", body.cache_salt
        if body.record_only:
            return {
                "record": str(
                    await while_connected(request, service.creation.record(context, salt))
                )
            }
        id_ = await while_connected(request, service.creation.create(context, salt))
        return msgspec.structs.asdict(service.describe(id_, salt))

    # In threads, for they read files.
    @routes.get("/list")
    def every(cache_salt: str | None = None) -> dict[str, Any]:
        found, unreadable, damaged = service.all(cache_salt)
        return {
            "contexts": [*map(msgspec.structs.asdict, found)],
            "unreadable": unreadable,
            "damaged": damaged,
            "storing": service.creation.progress(cache_salt),
        }

    @routes.get("/{id_}")
    def one(id_: str, cache_salt: str | None = None) -> dict[str, Any]:
        return msgspec.structs.asdict(service.describe(id_, cache_salt))

    @routes.delete("/{id_}")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    def delete(id_: str, cache_salt: str | None = None) -> dict[str, Any]:
        service.delete(id_, cache_salt)
        return {"deleted": id_}

    add_routes(app, routes)
