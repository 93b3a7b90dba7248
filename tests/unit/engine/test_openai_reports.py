"""Reports of the powers in OpenAI responses: whole bodies, streams, several choices, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient

from sgl_ext.engine.front import openai_reports
from sgl_ext.engine.front.openai_reports import OpenaiReports

CHAT, COMPLETIONS, INVOCATIONS = openai_reports.PATHS
TIERS, CHUNKS = {"power": "tiers", "exact": True}, {"power": "chunks", "exact": False}


def answer(index: int, *entries: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "meta_info": {"ext": [*entries]} if entries else {}}


def choice(index: int, finish: str | None = "stop") -> dict[str, Any]:
    return {"index": index, "text": 'a "finish_reason":"b', "finish_reason": finish}


def client(answers: list[Any], body: Any, *, status: int = 200) -> TestClient:
    """Returns a client of an application that keeps ``answers`` and responds with ``body``.

    Args:
        body: response in JSON, or chunks of a stream.
    """
    app = FastAPI()

    async def respond(request: Request) -> Any:
        if not isinstance(body, list):
            for each in answers:
                openai_reports.keep(request, each)
            return JSONResponse(body, status)

        async def chunks() -> AsyncIterator[bytes]:
            for each in answers:
                openai_reports.keep(request, each)
            for chunk in body:
                yield b"data: " + (json.dumps(chunk).encode() if chunk else b"[DONE]") + b"\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    for path in (CHAT, COMPLETIONS, INVOCATIONS, "/generate"):
        app.add_api_route(path, respond, methods=["POST"])
    app.add_middleware(OpenaiReports)
    return TestClient(app)


@pytest.mark.parametrize("path", openai_reports.PATHS)
def test_whole_responses_have_the_entries(path: str) -> None:
    body = {"choices": [choice(0)], "usage": {"total_tokens": 3}}
    found = client([answer(0, TIERS, CHUNKS)], body).post(path)
    assert found.json() == {**body, "sglext": {"ext": [TIERS, CHUNKS]}}
    assert int(found.headers["content-length"]) == len(found.content)


def test_entries_stand_beside_the_extensions_of_sglang() -> None:
    body = {"choices": [choice(0)], "sglext": {"cached_tokens_details": {"device": 3}}}
    found = client([answer(0, TIERS)], body).post(CHAT).json()
    assert found["sglext"] == {"cached_tokens_details": {"device": 3}, "ext": [TIERS]}


def test_cached_tokens_are_told_by_every_source() -> None:
    details = {"device": 16, "ssd": 928}
    kept = answer(0, TIERS)
    kept["meta_info"]["cached_tokens_details"] = details
    theirs = {"sglext": {"cached_tokens_details": {"device": 16, "host": 0}}}
    whole = client([kept], {"choices": [choice(0)], **theirs}).post(CHAT).json()
    assert whole["sglext"] == {"cached_tokens_details": details, "ext": [TIERS]}
    chunks = [{"choices": [choice(0)]}, {"choices": [], **theirs}, None]
    text = client([kept], chunks).post(CHAT).text
    _, last, *_ = [json.loads(each[6:]) for each in text.split("\n\n") if each[6:7] == "{"]
    assert last == {"choices": [], "sglext": {"cached_tokens_details": details}}


def test_entries_on_several_choices_name_their_index() -> None:
    body = {"choices": [choice(0), choice(1), choice(2)]}
    answers = [[answer(0, TIERS), answer(1), answer(2, CHUNKS)]]
    found = client(answers, body).post(CHAT).json()
    assert found["sglext"]["ext"] == [{"index": 0, **TIERS}, {"index": 2, **CHUNKS}]


def test_streams_have_the_entries_in_the_chunk_that_ends_their_choice() -> None:
    usage = {"choices": [], "usage": {"total_tokens": 3}}
    chunks = [
        {"choices": [choice(0, None)]}, {"choices": [choice(1, None)]},
        {"choices": [choice(1)]}, {"choices": [choice(0)]}, usage, None,
    ]  # fmt: skip
    answers = [answer(0, TIERS), answer(1), answer(0, TIERS, CHUNKS)]
    text = client(answers, chunks).post(CHAT).text
    *events, done, rest = text.split("\n\n")
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert found == [*chunks[:3], {**chunks[3], "sglext": {"ext": [TIERS, CHUNKS]}}, usage]  # type: ignore[dict-item]
    assert (done, rest) == ("data: [DONE]", "")


@pytest.mark.parametrize(
    ("answers", "path", "body", "status"),
    [
        ([answer(0)], CHAT, {"choices": [choice(0)]}, 200),
        ([answer(0, TIERS)], "/generate", {"choices": [choice(0)]}, 200),
        ([answer(0, TIERS)], CHAT, {"error": "too long"}, 400),
        ([], COMPLETIONS, {"choices": []}, 200),
    ],
)
def test_other_responses_stay_as_they_are(
    answers: list[Any], path: str, body: dict[str, Any], status: int
) -> None:
    found = client(answers, body, status=status).post(path)
    assert (found.status_code, found.json()) == (status, body)


def test_requests_without_http_are_ignored() -> None:
    openai_reports.keep(None, answer(0, TIERS))
    openai_reports.keep(object(), answer(0, TIERS))
