"""Tests of HTTP error answers, which contain the reason and neither a path nor a traceback."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel

from sgl_ext.engine.front.errors import (
    RefusedError,
    SectionOffError,
    _anthropic,
    _openai,
    install,
)
from sgl_ext.errors import ExtError


class Body(BaseModel):
    """Request body of the routes."""

    number: int


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.exception_handler(RequestValidationError)
    async def theirs(_request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"message": f"{error} {error.errors()}"}, 400)

    @app.post("/generate")
    @app.post("/v1/messages")
    async def generate(body: Body) -> dict[str, Any]:
        if body.number == 1:
            raise IndexError("list index out of range")
        if body.number == 2:
            raise RuntimeError("a fault of the server")
        return {}

    install(app, {"chunks": "/ext/chunks", "clusters": "/ext/clusters"})
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("path", ["/generate", "/v1/messages"])
def test_an_invalid_body_gets_400_without_internals(client: TestClient, path: str) -> None:
    answer = client.post(path, json={"number": ["secret"]})
    assert answer.status_code == 400
    assert "valid integer" in answer.text
    for part in (".py", "line", "secret"):
        assert part not in answer.text
    if path == "/generate":
        assert answer.json()["message"] == "body.number: Input should be a valid integer"


def test_errors_for_unexpected_values_get_400_and_one_log_line(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    answer = client.post("/generate", json={"number": 1})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == "the request cannot be read (IndexError: list index out of range)"
    (record,) = caplog.records
    assert (
        "POST /generate was refused: the request cannot be read (IndexError" in record.getMessage()
    )
    assert record.exc_info is None
    assert client.post("/generate", json={"number": 2}).status_code == 500


@pytest.mark.parametrize(
    ("method", "path", "section"),
    [
        ("POST", "/ext/chunks", "chunks"),
        ("GET", "/ext/chunks/list", "chunks"),
        ("DELETE", "/ext/clusters/stx-a", "clusters"),
        ("POST", "/ext/clusters", "clusters"),
    ],
)
def test_routes_of_a_disabled_section_get_404_with_the_reason(
    client: TestClient, method: str, path: str, section: str
) -> None:
    answer = client.request(method, path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == 404
    assert f"requires the section {section}, which is not enabled; start the" in error["message"]


def test_no_route_is_added_for_an_enabled_section(client: TestClient) -> None:
    answer = client.post("/ext/swap/priority", json={})
    assert answer.status_code == 404
    assert answer.json() == {"detail": "Not Found"}


@pytest.mark.parametrize(
    ("error", "code"), [(TypeError("no"), 400), (ValueError("no"), 400), (RuntimeError("no"), 500)]
)
def test_client_errors_that_sglang_catches_get_400(error: Exception, code: int) -> None:
    told: list[dict[str, Any]] = []

    def respond(_serving: object, message: str, **kw: Any) -> None:
        told.append({"message": message, **kw})

    try:
        raise error
    except Exception:
        _openai(respond, None, message="Internal server error: no", status_code=500)
        _anthropic(respond, None, message="Internal server error", status_code=500)
    assert [one["status_code"] for one in told] == [code, code]
    if code == 400:
        assert {one["message"] for one in told} == {
            f"the request cannot be read ({type(error).__name__}: no)"
        }
    told.clear()
    _openai(respond, None, "overloaded", status_code=503)
    assert told == [{"message": "overloaded", "status_code": 503}]


@pytest.mark.parametrize(
    ("error", "told"),
    [(SectionOffError("off"), {"err_type": "404", "status_code": 404}), (ExtError("no"), {})],
)
def test_the_status_of_a_refusal_reaches_clients_of_openais_routes(
    error: ExtError, told: dict[str, Any]
) -> None:
    def respond(_serving: object, message: str, **kw: Any) -> dict[str, Any]:
        return {"message": message, **kw}

    try:
        raise RefusedError(error)
    except ValueError as refused:  # as SGLang's routes catch it
        answer = _openai(respond, None, str(refused))
    assert answer == {"message": str(error), **told}


def test_a_client_error_is_logged_with_its_place_and_no_traceback(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert client is not None
    logger = logging.getLogger("sglang.srt.entrypoints.openai.serving_base")
    for error in (TypeError("no"), RuntimeError("no")):
        try:
            raise error
        except (TypeError, RuntimeError):
            logger.exception("Error in request: %s", error)
    one, whole = caplog.records
    assert one.getMessage().startswith("Error in request: no (")
    assert "test_http_errors.py:" in one.getMessage()
    assert one.exc_info is None
    assert whole.exc_info
