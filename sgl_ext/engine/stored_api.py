"""``/ext/stored_contexts``: the routes of a server's contexts on devices."""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from sgl_ext.engine.context_parts import refusal
from sgl_ext.engine.stored_service import StoredService
from sgl_ext.errors import ExtError


class StoreContext(BaseModel):
    """What ``POST /ext/stored_contexts`` takes."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(min_length=1)] | None = None
    """The context, from the prompt's first token on."""
    input_ids: Annotated[list[StrictInt], Field(min_length=1)] | None = None
    """Its token ids, instead."""
    record_only: bool = False
    """Whether it is written into a file, for ``sgl-ext cluster`` to store it."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids")
        return self


def install(app: FastAPI, service: StoredService) -> None:
    """Adds the routes to SGLang's HTTP server, before that is started."""
    routes = APIRouter(prefix="/ext/stored_contexts")

    @routes.post("")
    async def create(body: StoreContext) -> dict[str, Any]:
        context = body.text or body.input_ids or ""
        if body.record_only:
            return {"record": str(await service.record(context))}
        found = await service.create(context)
        return msgspec.structs.asdict(found)

    @routes.get("/list")
    async def every() -> dict[str, Any]:
        found, unreadable = service.all()
        return {
            "contexts": [*map(msgspec.structs.asdict, found)],
            "unreadable": unreadable,
            "storing": service.progress,
        }

    @routes.get("/{id_}")
    async def one(id_: str) -> dict[str, Any]:
        return msgspec.structs.asdict(service.describe(id_))

    @routes.delete("/{id_}")
    async def delete(id_: str) -> dict[str, Any]:
        service.delete(id_)
        return {"deleted": id_}

    app.include_router(routes)
    app.add_exception_handler(ExtError, refusal)
