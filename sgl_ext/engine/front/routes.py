"""HTTP routes of the extension on SGLang's server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from sglang.srt.entrypoints.http_server import ORJSONRoute

from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from fastapi import FastAPI


class InvalidBodyError(ExtError):
    """Error raised for a body whose shape the route does not accept."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class ExtRoute(ORJSONRoute):
    """Route that answers 422 and names the invalid fields of a body.

    SGLang's own answer is 400 and names the source file of the route.
    """

    def get_route_handler(self) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        original = super().get_route_handler()

        async def handle(request: object) -> object:
            try:
                return await original(request)
            except RequestValidationError as error:
                wrong = [f"{_place(each)}: {each['msg']}" for each in error.errors()]
                raise InvalidBodyError("; ".join(wrong)) from None

        return handle


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Adds a router's routes to the application itself.

    SGLang looks up a route's ``auth_level`` only among the application's own routes, and assumes
    ``NORMAL`` for the routes of an included router.
    """
    app.router.routes.extend(router.routes)


def _place(error: Any) -> str:
    return ".".join(str(part) for part in error["loc"] if part != "body") or "body"
