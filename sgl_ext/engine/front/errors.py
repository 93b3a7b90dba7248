"""Error answers of SGLang's HTTP server that contain the reason and nothing else."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.workarounds.checks import MALFORMED
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)

_CLIENTS = (*MALFORMED, ValueError)
"""Exceptions that SGLang's routes raise for unexpected values."""
_CATCHING = (
    "openai.serving_base", "openai.serving_tokenize", "openai.serving_responses",
    "openai.serving_rerank", "anthropic.serving",
)  # fmt: skip
"""Modules of SGLang that catch such errors, log tracebacks and answer with 500."""
_ENTRYPOINTS = "sglang.srt.entrypoints"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_SHOWN = 5
"""Maximum number of problems of a body that an answer names."""
_OWN_SHAPES = ("/v1/messages", "/v1/responses", "/v1/systemone")
"""Paths whose errors SGLang formats as their API requires."""


class SectionOffError(ExtError):
    """Error raised for a route of a section that is off."""

    status = 404


class RefusedError(ValueError):
    """Form of an ``ExtError`` that SGLang's routes answer with the error's HTTP status.

    They answer a ``ValueError`` with its ``status_code`` or, if they are OpenAI's, with 400, and
    other errors with 500.
    """

    def __init__(self, error: ExtError) -> None:
        super().__init__(str(error))
        self.status_code = error.status


async def refusal(_request: Request, error: Exception) -> JSONResponse:
    """Returns the answer to a request that failed with ``error``."""
    code = error.status if isinstance(error, ExtError) else 400
    return JSONResponse({"error": {"message": str(error), "code": code}}, code)


class Malformed:
    """ASGI middleware that answers 400 when SGLang's routes raise an error for unexpected values.

    Without it such a request ends with 500, and the log has a traceback.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except _CLIENTS as error:
            logger.error(
                "%s %s was refused: %.300s (%s)",
                scope["method"], scope["path"], _reason(error), _place(error),
            )  # fmt: skip
            if not started:
                answer = await refusal(Request(scope), ExtError(_reason(error)))
                await answer(scope, receive, send)


def _reason(error: BaseException) -> str:
    return f"the request cannot be read ({type(error).__name__}: {error!s:.300})"


def _place(error: BaseException) -> str:
    """Returns file and line at which the error was raised, for the log."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{where.filename}:{where.lineno}"


def _one_line(record: logging.LogRecord) -> bool:
    """Replaces the traceback of a client's error in the log by the place of the error."""
    if record.exc_info and isinstance(error := record.exc_info[1], _CLIENTS):
        record.msg, record.args = f"{record.getMessage()} ({_place(error)})", None
        record.exc_info = None
    return True


def _openai(original: Original, serving: object, message: str, *args: object, **kw: Any) -> object:
    error = sys.exc_info()[1]
    if isinstance(error, RefusedError):
        if error.status_code != HTTPStatus.BAD_REQUEST:
            kw.update(err_type=str(error.status_code), status_code=error.status_code)
    elif (
        isinstance(error, _CLIENTS)
        and kw.get("status_code", 400) >= HTTPStatus.INTERNAL_SERVER_ERROR
    ):
        kw.update(err_type="BadRequestError", status_code=400)
        message = _reason(error)
    return original(serving, message, *args, **kw)


def _anthropic(original: Original, *args: object, **kw: Any) -> object:
    error = sys.exc_info()[1]
    if isinstance(error, _CLIENTS) and kw["status_code"] >= HTTPStatus.INTERNAL_SERVER_ERROR:
        kw.update(error_type="invalid_request_error", status_code=400, message=_reason(error))
    return original(*args, **kw)


def install(app: FastAPI, off: Mapping[str, str]) -> None:
    """Adds error handlers, middleware, log filters and routes to SGLang's HTTP server.

    Call it before the server starts.

    Args:
        off: paths of routes of sections that are off, by the section's name.
    """
    theirs: Any = app.exception_handlers[RequestValidationError]

    async def invalid(request: Request, error: Exception) -> Response:
        """Returns what is wrong with a body, without the server's paths and the body itself."""
        problems = error.errors() if isinstance(error, RequestValidationError) else []
        plain = [{name: one[name] for name in ("type", "loc", "msg")} for one in problems[:_SHOWN]]
        if request.url.path.startswith(_OWN_SHAPES):
            answer: Response = await theirs(request, RequestValidationError(plain))
            return answer
        message = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in plain)
        body = {"object": "error", "message": message, "type": "Bad Request", "param": None}
        return JSONResponse({**body, "code": 400}, 400)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ExtError, refusal)
    app.add_middleware(Malformed)
    for module in _CATCHING:
        logging.getLogger(f"{_ENTRYPOINTS}.{module}").addFilter(_one_line)
    for section, path in off.items():
        for each in (path, f"{path}/{{rest:path}}"):
            app.add_api_route(each, _off(section, path), methods=_METHODS)


def _off(section: str, path: str) -> Callable[[], None]:
    def off() -> None:
        raise SectionOffError(
            f"{path} requires the section {section}, which is not enabled; start the server with "
            f"{section} in its configuration (--ext-config)"
        )

    return off


LAUNCHER_HOOKS = (
    hooks.Hook(
        f"{_ENTRYPOINTS}.openai.serving_base.OpenAIServingBase.create_error_response",
        "around",
        _openai,
        "SGLang answers with 500 for any error but ValueError",
    ),
    hooks.Hook(
        f"{_ENTRYPOINTS}.openai.serving_responses.OpenAIServingResponses.create_error_response",
        "around",
        _openai,
        "SGLang answers with 500 for any error but ValueError",
    ),
    hooks.Hook(
        f"{_ENTRYPOINTS}.anthropic.serving.AnthropicServing._error_response",
        "around",
        _anthropic,
        "SGLang answers with 500 for any error but ValueError",
    ),
)
