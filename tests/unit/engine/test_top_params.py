"""Parameters of the powers at the top level of a request reach SGLang's ``custom_params``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from sgl_ext.engine.front.top_params import TopParams

FOLLOW = {"id": "stx-1"}
OPENAI = sorted(TopParams.paths - {"/generate"})


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    async def echo(request: Request) -> Any:
        return {"body": (await request.body()).decode()}

    for path in (*TopParams.paths, "/other"):
        app.add_api_route(path, echo, methods=["POST"])
    app.add_middleware(TopParams, keys={"ext_stored"})
    return TestClient(app)


def sent(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    return json.loads(client.post(path, json=body).json()["body"])


@pytest.mark.parametrize("path", OPENAI)
def test_openai_requests_take_the_parameter_beside_the_others(
    client: TestClient, path: str
) -> None:
    body = {"model": "m", "ext_stored": FOLLOW}
    assert sent(client, path, body) == {"model": "m", "custom_params": {"ext_stored": FOLLOW}}
    both = {**body, "custom_params": {"other": 1}}
    assert sent(client, path, both)["custom_params"] == {"other": 1, "ext_stored": FOLLOW}


@pytest.mark.parametrize(
    ("params", "found"),
    [
        (None, {"custom_params": {"ext_stored": FOLLOW}}),
        ({"temperature": 0}, {"temperature": 0, "custom_params": {"ext_stored": FOLLOW}}),
        (
            [{"n": 1}, {"custom_params": {"a": 2}}],
            [
                {"n": 1, "custom_params": {"ext_stored": FOLLOW}},
                {"custom_params": {"a": 2, "ext_stored": FOLLOW}},
            ],
        ),
    ],
)
@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"ext_stored": FOLLOW}, {}),
        ({"custom_params": {"ext_stored": FOLLOW, "b": 3}}, {"custom_params": {"b": 3}}),
    ],
)
def test_generate_takes_them_at_the_top_level(
    client: TestClient, params: Any, found: Any, given: dict[str, Any], left: dict[str, Any]
) -> None:
    body = {"text": "a", "sampling_params": params, **given}
    assert sent(client, "/generate", body) == {"text": "a", "sampling_params": found, **left}


def test_a_parameter_with_two_values_is_refused(client: TestClient) -> None:
    other = {"ext_stored": {"id": "stx-2"}}
    bodies = {
        OPENAI[0]: {"ext_stored": FOLLOW, "custom_params": other},
        "/generate": {"ext_stored": FOLLOW, "sampling_params": {"custom_params": other}},
    }
    for path, body in bodies.items():
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert "ext_stored is given twice" in answer.json()["error"]["message"]
    same = {"ext_stored": FOLLOW, "custom_params": {"ext_stored": FOLLOW}}
    assert sent(client, OPENAI[0], same) == {"custom_params": {"ext_stored": FOLLOW}}


@pytest.mark.parametrize(
    "body",
    [
        {"ext_stored": None, "text": "a"},
        {"text": "ext_stored"},
        {"text": "a", "sampling_params": {"custom_params": {"other": 1}}},
        {"text": "a", "sampling_params": 7, "custom_params": {"other": 1}},
        {
            "text": "a",
            "custom_params": {"other": 1},
            "sampling_params": {"custom_params": {"a": 2}},
        },
        {"text": "a", "custom_params": "none"},
    ],
)
def test_other_requests_are_passed_on(client: TestClient, body: dict[str, Any]) -> None:
    expected = {key: value for key, value in body.items() if key not in ("ext_stored",)}
    assert sent(client, "/generate", body) == expected
    assert sent(client, "/other", body) == body


def test_bodies_that_only_pythons_parser_reads_are_rewritten(client: TestClient) -> None:
    body = '{"ext_stored": {"id": "stx-1"}, "temperature": NaN, "text": "\\ud800"}'
    found = client.post("/v1/completions", content=body).json()["body"]
    assert json.loads(found)["custom_params"] == {"ext_stored": FOLLOW}
    assert "NaN" in found
    assert client.post("/v1/completions", content='{"ext_stored"').json()["body"] == '{"ext_stored"'
