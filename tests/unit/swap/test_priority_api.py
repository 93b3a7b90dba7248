"""``POST /ext/swap/priority`` without a model: authorization, validation, useless policies."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints.http_server import validation_exception_handler
from sglang.srt.utils.auth import add_api_key_middleware

from sgl_ext.engine.front.errors import refusal
from sgl_ext.engine.swap import api as priority_api
from sgl_ext.errors import ExtError

BODY = {"rid": "one", "priority": 3}


def served(policy: str, *, by_priority: bool = False, **keys: str) -> TestClient:
    """Returns a client for the route of a server that has the request ``one``."""

    async def set_internal_state(asked: Any) -> list[bool]:
        return [asked.server_args == {"sgl_ext.priority/one": 3}]

    app = FastAPI(exception_handlers={422: validation_exception_handler})
    manager = SimpleNamespace(set_internal_state=set_internal_state)
    app.add_exception_handler(ExtError, refusal)
    priority_api.install(app, manager, priority_api.useless(policy, by_priority))
    if keys:
        found = {"api_key": None, "admin_api_key": None, **keys}
        add_api_key_middleware(app, **found)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(("policy", "by_priority"), [("static", True), ("sglang", True)])
def test_priority_is_set_under_policies_that_use_it(policy: str, by_priority: bool) -> None:
    client = served(policy, by_priority=by_priority)
    answer = client.post("/ext/swap/priority", json=BODY)
    assert (answer.status_code, answer.json()) == (200, BODY)
    answer = client.post("/ext/swap/priority", json=BODY | {"rid": "nobody"})
    assert answer.status_code == 404


@pytest.mark.parametrize("policy", ["sglang", "fcfs", "round-robin", "token-counter", "random"])
def test_priority_is_rejected_under_policies_that_ignore_it(policy: str) -> None:
    by_priority = policy != "sglang"  # the other policies enable priority scheduling
    answer = served(policy, by_priority=by_priority).post("/ext/swap/priority", json=BODY)
    assert answer.status_code == 400
    assert f"swap.policy is {policy}" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"priority": "high"}, "priority: Input should be a valid integer"),
        ({"priority": 1.5}, "priority: "),
        ({"priority": True}, "priority: "),
        ({"priority": None}, "priority: "),
        ({"priority": 1 << 31}, "priority: "),
        ({"rid": ""}, "rid: "),
        ({"rid": []}, "rid: "),
        ({"rids": []}, "rids: Extra inputs are not permitted"),
        ({"\ud800": 1}, ""),
        ({"rid": "\ud800"}, ""),
    ],
)
def test_malformed_bodies_are_answered_with_422(change: dict[str, Any], named: str) -> None:
    client = served("static", by_priority=True)
    headers = {"content-type": "application/json"}
    answer = client.post("/ext/swap/priority", content=json.dumps(BODY | change), headers=headers)
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert message.startswith(named)
    assert ".py" not in message
    assert client.post("/ext/swap/priority", content=b"{", headers=headers).status_code == 422


def test_the_route_requires_the_admin_key_if_one_is_set() -> None:
    for keys, given, code in (
        ({"api_key": "user"}, "user", 200),
        ({"api_key": "user", "admin_api_key": "admin"}, "user", 401),
        ({"api_key": "user", "admin_api_key": "admin"}, "admin", 200),
        ({"admin_api_key": "admin"}, "", 401),
    ):
        headers = {"Authorization": f"Bearer {given}"}
        client = served("static", by_priority=True, **keys)
        assert client.post("/ext/swap/priority", json=BODY, headers=headers).status_code == code, (
            keys
        )


@pytest.mark.parametrize("value", [math.inf, math.nan, 1.5, 1 << 31, 1 << 63, -(1 << 31) - 1])
def test_no_other_number_is_set_through_the_route_of_sglang(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(priority_api, "_give", lambda *asked: given.append(asked[-1]) or True)
    state = SimpleNamespace(scheduler=None)

    def set_to(number: float) -> Any:
        asked = SimpleNamespace(server_args={"sgl_ext.priority/x": number})
        return priority_api._set(lambda *_: None, state, asked)

    assert not set_to(value).updated
    assert given == []
    assert set_to(7).updated
    assert given == [7]
