"""HTTP API of the context cache, and contexts in the bodies of SGLang's routes, without a model."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from context_kit import Manager
from fastapi import FastAPI, HTTPException, Request
from fastapi.testclient import TestClient
from pydantic import ValidationError
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_ext.chunks.contexts import Context
from sgl_ext.chunks.kept import KeptContexts
from sgl_ext.chunks.split import Split
from sgl_ext.config import Chunks
from sgl_ext.engine.chunks import prepare, splitting
from sgl_ext.engine.chunks import prompt as linking
from sgl_ext.engine.chunks.api import CreateContexts, install
from sgl_ext.engine.chunks.middleware import Parts
from sgl_ext.engine.chunks.parameters import AUTOMATIC, MARKED
from sgl_ext.engine.chunks.service import ALONE, ContextService
from sgl_ext.engine.front import client_gone
from sgl_ext.engine.front.bodies import read
from sgl_ext.engine.front.errors import refusal
from sgl_ext.errors import ExtError
from sgl_ext.marks import mark

JSON = {"content-type": "application/json"}


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def service(manager: Manager) -> ContextService:
    return ContextService(manager, method="lego-2", limit=10, page=16, token_bytes=100, pool=1000)


@pytest.fixture
def client(service: ContextService) -> TestClient:
    app = FastAPI()
    app.add_exception_handler(ExtError, refusal)
    install(app, service, Chunks(method="lego-2", automatic=True))

    @app.post("/generate")
    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def echo(request: Request) -> Any:
        return await request.json()

    return TestClient(app)


def create(client: TestClient, *chunks: object, **more: object) -> list[dict[str, Any]]:
    answer = client.post("/ext/chunks", json={"chunks": chunks, **more})
    assert answer.status_code == 200, answer.text
    contexts: list[dict[str, Any]] = answer.json()["contexts"]
    return contexts


def test_blending_is_refused_for_a_model_of_two_layers(client: TestClient) -> None:
    response = client.post("/ext/chunks", json={"chunks": ["a text"], "method": "blend-9"})
    assert response.status_code == 400
    assert "this model has 2 layers; choose another method" in response.json()["error"]["message"]


def test_contexts_are_computed_looked_up_listed_and_deleted(
    client: TestClient, manager: Manager
) -> None:
    text, ids = create(client, "chunk", [5, 6, 7], ttl=60)
    assert (text["tokens"], text["bytes"], text["method"]) == (5, 500, "lego-2")
    assert 0 < text["expires_in"] <= 60
    computed = [list(request.input_ids) for request in manager.requests]
    assert computed == [[*b"chunk", *[0] * 11], [5, 6, 7, *[0] * 13]]
    assert {request.extra_key for request in manager.requests} == {"ext:chunk"}
    assert client.get(f"/ext/chunks/{ids['id']}").json()["tokens"] == 3
    found = client.get("/ext/chunks/list").json()["contexts"]
    assert [context["id"] for context in found] == [text["id"], ids["id"]]
    assert client.delete(f"/ext/chunks/{text['id']}").status_code == 200
    for method in (client.get, client.delete):
        answer = method(f"/ext/chunks/{text['id']}")
        assert answer.status_code == 404
        assert "create it again" in answer.json()["error"]["message"]


def test_progress_is_streamed_and_evicted_contexts_are_announced(manager: Manager) -> None:
    service = ContextService(
        manager, method="lego-2", limit=10, page=16, token_bytes=100, pool=1000, room=5
    )
    app = FastAPI()
    install(app, service, Chunks(method="lego-2"))
    client = TestClient(app)

    def events(*chunks: str) -> list[dict[str, Any]]:
        answer = client.post("/ext/chunks", json={"chunks": chunks, "stream": True})
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line]

    *progress, last = events("abc", "de")
    assert progress == [{"progress": "1/2"}, {"progress": "2/2"}]
    assert [each["tokens"] for each in last.pop("contexts")] == [3, 2]
    assert not last
    (_, last) = events("f")
    assert "total more than the 5 tokens that the KV pool" in last["warning"]
    (last,) = events("")
    assert "chunk 0 is empty" in last["error"]["message"]


def test_contexts_that_cannot_be_kept_are_not_created(manager: Manager, tmp_path: Path) -> None:
    kept = KeptContexts(tmp_path, "a model")
    service = ContextService(
        manager, method="lego-2", limit=10, page=16, token_bytes=100, pool=1000, kept=kept
    )
    asyncio.run(service.create(["abc"]))
    add, full = kept.add, ExtError("the device is full")

    def second_fails(context: Context, ttl: float | None) -> None:
        if context.text == "e":
            raise full
        add(context, ttl)

    with mock.patch.object(kept, "add", second_fails), pytest.raises(ExtError, match="full"):
        asyncio.run(service.create(["d", "e"]))
    (one,) = service.contexts.all()
    asyncio.run(service.create(["f"]))
    assert [each.text for each, _ in kept.all()] == ["abc", "f"]
    asyncio.run(service.delete(one.id, None))
    assert [each.text for each, _ in kept.all()] == ["f"]
    kept.close()


def test_a_change_that_cannot_be_kept_leaves_all_contexts(manager: Manager, tmp_path: Path) -> None:
    """A creation does not evict others either, and a deletion can be repeated."""
    kept = KeptContexts(tmp_path, "a model")
    service = ContextService(
        manager, method="lego-2", limit=3, page=16, token_bytes=100, pool=1000, kept=kept
    )

    def fails() -> None:
        kept.undo()
        raise ExtError("the device is full")

    async def scene() -> None:
        before = await service.create(["a", "b", "c"])
        with mock.patch.object(kept, "commit", fails):
            with pytest.raises(ExtError, match="full"):
                await service.create(["d", "e"])
            with pytest.raises(ExtError, match="full"):
                await service.delete(before[1].id, None)
        found = service.contexts.all()
        assert {each.id for each in found} == {each.id for each in before}
        assert [each for each, _ in kept.all()] == before
        assert service.contexts.find("b") == before[1]
        await service.delete(before[1].id, None)
        await service.create(["d", "e"])
        assert [each.text for each in service.contexts.all()] == ["c", "d", "e"]
        assert [each.text for each, _ in kept.all()] == ["c", "d", "e"]

    asyncio.run(scene())
    kept.close()


def test_pinned_contexts_are_listed_and_stay(client: TestClient) -> None:
    one, two, three = create(client, "a", "b", "c")
    assert not one["pinned"]
    pinned = client.post(f"/ext/chunks/{one['id']}/pin")
    assert (pinned.status_code, pinned.json()) == (200, {**one, "pinned": True})
    assert client.post(f"/ext/chunks/{two['id']}/pin").status_code == 200
    refused = client.post(f"/ext/chunks/{three['id']}/pin")
    assert refused.status_code == 400
    assert "the maximum of 2 pinned contexts" in refused.json()["error"]["message"]
    many = client.post("/ext/chunks", json={"chunks": ["x"] * 9})
    assert many.status_code == 400
    assert "at most 8 beside 2 pinned contexts" in many.json()["error"]["message"]
    later = create(client, *"defghijk")
    found = client.get("/ext/chunks/list").json()["contexts"]
    assert [each["id"] for each in found] == [each["id"] for each in (one, two, *later)]
    assert [each["pinned"] for each in found] == [True] * 2 + [False] * 8
    assert client.post(f"/ext/chunks/{one['id']}/unpin").json() == one
    assert client.delete(f"/ext/chunks/{two['id']}").status_code == 200
    assert client.post(f"/ext/chunks/{later[0]['id']}/pin").json()["pinned"]


def test_chunks_for_which_pins_have_left_no_room_are_not_created(service: ContextService) -> None:
    prepare_all = service._preparation.prepare_all

    async def scene() -> None:
        (one,) = await service.create(["a"])

        async def with_a_pin(*arguments: Any) -> Any:
            await service.pin(one.id, None, pinned=True)
            return await prepare_all(*arguments)

        with (
            mock.patch.object(service._preparation, "prepare_all", with_a_pin),
            pytest.raises(ExtError, match=r"10 chunks .* keeps at most 9 beside 1 pinned contexts"),
        ):
            await service.create(["b"] * 10)
        assert [each.id for each in service.contexts.all()] == [one.id]

    asyncio.run(scene())


@pytest.mark.parametrize("id_", ["", "a", "a/b", "a/pin", "ctx-none/"])
def test_unknown_ids_get_404_with_the_id(client: TestClient, id_: str) -> None:
    path = f"/ext/chunks/{quote(id_, safe='')}"
    for answer in (
        client.get(path), client.delete(path), client.post(f"{path}/pin"),
        client.post(f"{path}/unpin"),
    ):  # fmt: skip
        assert answer.status_code == 404
        assert f"context {id_!r} not found" in answer.json()["error"]["message"]


def test_a_final_slash_of_the_route_is_ignored(client: TestClient) -> None:
    assert client.post("/ext/chunks/", json={"chunks": ["a"]}).json()["contexts"]


def test_a_request_misses_its_contexts_once(service: ContextService) -> None:
    def ended(missing: int) -> Any:
        reports = [{"power": "chunks", "missing": missing}]
        return {"meta_info": {"ext": reports, "finish_reason": {"type": "length"}}}

    with (
        mock.patch.object(service, "link", return_value=["the context"]),
        mock.patch.object(service, "_own"),
        mock.patch.object(service.renewal, "answered") as answered,
    ):
        watch = service.accept(mock.Mock())
        assert watch is not None
        for each in (ended(3), ended(3)):  # of a stream of two answers
            watch(each)
        answered.assert_called_once_with(["the context"], missing=True)


@pytest.mark.parametrize(("n", "renewed"), [(1, False), (2, True), (None, False)])
def test_a_prompt_with_several_answers_may_have_missed_its_contexts(
    service: ContextService, n: int | None, renewed: bool
) -> None:
    """SGLang discards the answer to the request that computes the prompt of all."""
    report = {"meta_info": {"ext": [{"power": "chunks", "missing": 0}], "finish_reason": {}}}
    with (
        mock.patch.object(service, "link", return_value=["the context"]),
        mock.patch.object(service.renewal, "answered") as answered,
    ):
        params = {} if n is None else {"n": n}
        watch = service.accept(mock.Mock(sampling_params=params))
        assert watch is not None
        watch(report)
        answered.assert_called_once_with(["the context"], missing=renewed)


def test_the_kv_of_a_pinned_context_is_computed(service: ContextService, manager: Manager) -> None:
    async def scene() -> None:
        (context,) = await service.create(["abc"], salt="s")
        await service.pin(context.id, "s", pinned=True)
        assert service.renewal._task is not None
        await service.renewal._task
        await service.pin(context.id, "s", pinned=False)

    asyncio.run(scene())
    first, second = manager.requests
    assert first.input_ids == second.input_ids
    assert (second.extra_key, second.cache_salt) == ("ext:chunk", "s")


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_change_is_kept_or_undone(
    manager: Manager, tmp_path: Path, fails: bool
) -> None:
    """The client goes away while the change is committed; the next change waits until it is."""
    kept = KeptContexts(tmp_path, "a model")
    service = ContextService(
        manager, method="lego-2", limit=10, page=16, token_bytes=100, pool=1000, kept=kept
    )
    begun, go_on = threading.Event(), threading.Event()
    commit = kept.commit

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        if fails:
            kept.undo()
            raise ExtError("the device is full")
        commit()

    async def scene() -> None:
        (one,) = await service.create(["abc"])
        with mock.patch.object(kept, "commit", slow):
            deleting = asyncio.create_task(service.delete(one.id, None))
            await asyncio.to_thread(begun.wait, 60)
            deleting.cancel()
            creating = asyncio.create_task(service.create(["d"]))
            await asyncio.sleep(0.01)
            assert not deleting.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await deleting
            with pytest.raises(ExtError) if fails else nullcontext():
                await creating
        expected = ["abc"] if fails else ["d"]
        assert [each.text for each in service.contexts.all()] == expected
        assert [each.text for each, _ in kept.all()] == expected

    asyncio.run(scene())
    kept.close()


def test_a_pin_that_cannot_be_kept_is_undone(manager: Manager, tmp_path: Path) -> None:
    kept = KeptContexts(tmp_path, "a model")
    service = ContextService(
        manager, method="lego-2", limit=10, page=16, token_bytes=100, pool=1000, kept=kept
    )
    full = ExtError("the device is full")

    def fails() -> None:
        kept.undo()
        raise full

    async def scene() -> None:
        (one,) = await service.create(["abc"])
        with mock.patch.object(kept, "commit", fails), pytest.raises(ExtError, match="full"):
            await service.pin(one.id, None, pinned=True)
        assert service.contexts.all() == [one]
        assert [each.pinned for each, _ in kept.all()] == [False]
        await service.pin(one.id, None, pinned=True)
        kept.undo()  # nothing that was not committed
        with mock.patch.object(kept, "commit", fails), pytest.raises(ExtError, match="full"):
            await service.pin(one.id, None, pinned=False)
        assert service.contexts.pinned == 1
        assert [each.pinned for each, _ in kept.all()] == [True]

    asyncio.run(scene())
    kept.close()


def test_long_texts_are_split(client: TestClient, manager: Manager) -> None:
    made = create(client, "abcdefgh", [7, 8, 9], split={"by": "tokens", "tokens": 3})
    assert [context["tokens"] for context in made] == [3, 3, 2, 3]
    computed = [bytes(request.input_ids).rstrip(b"\0") for request in manager.requests]
    assert computed == [b"abc", b"def", b"gh", b"\7\x08\t"]
    answer = client.post("/ext/chunks", json={"chunks": ["a"], "split": {"by": "tokens"}})
    assert answer.status_code == 400
    assert "requires tokens, the maximum tokens of a part" in answer.json()["error"]["message"]


def test_a_short_text_is_split_before_a_long_one_ends(service: ContextService) -> None:
    how, done = Split(by="paragraph", tokens=50), []

    async def parts(name: str, text: str) -> None:
        await service.splitting.parts([text], how, 1 << 20)
        done.append(name)

    async def both() -> None:
        await asyncio.gather(parts("long", "x" * 200_000), parts("short", "y" * 200))

    asyncio.run(both())
    assert done == ["short", "long"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"chunks": ["x" * 400_000], "split": {"by": "paragraph", "tokens": 4}}, "more than 1024"),
        ({"chunks": ["x" * (1 << 22)], "prefix": "p"}, "have 4194305 characters, but a request"),
        ({"chunks": ["x"] * 11}, "11 chunks were given at once, but the server keeps at most 10"),
    ],
)
def test_too_many_parts_characters_or_chunks_are_rejected(
    client: TestClient, manager: Manager, body: dict[str, Any], message: str
) -> None:
    answer = client.post("/ext/chunks", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert not manager.requests


def test_splitting_has_a_deadline(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "LIMIT_S", 0.0)
    body = {"chunks": ["x" * 100], "split": {"by": "paragraph", "tokens": 8}}
    answer = client.post("/ext/chunks", json=body)
    assert answer.status_code == 400
    assert "splitting took more than 0 s" in answer.json()["error"]["message"]


class Slow:
    """Tokenizer whose calls take a millisecond or more."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.read.append(text[0])
        time.sleep(0.001)
        return [add_special_tokens] * len(text)


@pytest.fixture
def slow() -> Iterator[tuple[Slow, splitting.Splitting]]:
    tokenizer = Slow()
    with ThreadPoolExecutor(1) as tokenizing:
        yield tokenizer, splitting.Splitting(tokenizer, tokenizing, 1 << 20)


def test_long_steps_take_turns_on_the_tokenizer(slow: tuple[Slow, splitting.Splitting]) -> None:
    tokenizer, splitter = slow
    how = Split(by="paragraph", tokens=400)  # each text is one step

    async def both() -> None:
        texts = ("a " * 4000, "b " * 4000)
        await asyncio.gather(*(splitter.parts([text], how, 1 << 20) for text in texts))

    asyncio.run(both())
    turns = sum(one != other for one, other in pairwise(tokenizer.read))
    assert turns > len(tokenizer.read) // 4


def test_a_cancelled_step_makes_at_most_one_more_tokenizer_call(
    slow: tuple[Slow, splitting.Splitting],
) -> None:
    tokenizer, splitter = slow
    how = Split(by="markdown", tokens=400)

    async def left() -> int:
        whole = asyncio.ensure_future(splitter.parts(["* a\n" * 5000], how, 1 << 20))
        while len(tokenizer.read) < 10:
            await asyncio.sleep(0.001)
        whole.cancel()
        await asyncio.wait([whole])
        return len(tokenizer.read)

    asyncio.run(left())
    before = len(tokenizer.read)
    splitter._threads.shutdown()  # waits for the remaining work
    assert len(tokenizer.read) <= before + 1


def test_part_sizes_are_reduced_to_the_longest_computable_chunk(client: TestClient) -> None:
    made = create(client, "x" * 150, split={"by": "tokens", "tokens": 1000})
    assert [context["tokens"] for context in made] == [67, 67, 16]


def test_work_is_cancelled_when_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_gone, "LOOK_S", 0.01)
    ended = []

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(True)
            raise
        return "done"

    async def ask(*connected: bool) -> str:
        looks = iter(connected)

        async def gone() -> bool:
            return not next(looks)

        request: Any = SimpleNamespace(is_disconnected=gone)
        try:
            return await client_gone.while_connected(request, work())
        finally:
            await asyncio.sleep(0)

    with pytest.raises(client_gone.ClientGoneError):
        asyncio.run(ask(True, True, False))
    assert ended == [True]


def test_a_primed_default_falls_back_without_other_chunks(manager: Manager) -> None:
    service = ContextService(
        manager, method="primed", limit=10, page=16, token_bytes=100, pool=1000
    )
    (alone,) = asyncio.run(service.create(["one"]))
    assert (alone.method, alone.before) == (ALONE, ())
    (second,) = asyncio.run(service.create(["two"]))
    assert (second.method, second.before) == ("primed", (1, *b"one"))
    (asked,) = asyncio.run(service.create(["two"], method="naive"))
    assert asked.method == "naive"
    with pytest.raises(ExtError, match="computed after other chunks of its kind"):
        asyncio.run(service.create(["one"], method="primed", salt="nobody"))


def test_chunks_that_begin_with_all_others_are_not_primed(manager: Manager) -> None:
    service = ContextService(
        manager, method="primed", limit=10, page=16, token_bytes=100, pool=1000
    )
    asyncio.run(service.create(["one"]))
    (longer,) = asyncio.run(service.create(["one and more"]))
    assert (longer.method, longer.before, longer.recompute) == (ALONE, (), tuple(range(12)))
    one, longer = asyncio.run(service.create(["one", "one and more"], salt="another"))
    assert (one.method, one.before) == ("primed", (1, *b"one an"))
    assert (longer.method, longer.before) == (ALONE, ())
    with pytest.raises(ExtError, match="computed after other chunks of its kind"):
        asyncio.run(service.create(["one and more"], method="primed", salt="third"))


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({}, [42, 42, 42, 24]),
        ({"prefix": "p" * 10}, [32, 32, 32, 32, 22]),
        ({"method": "lego-0"}, [63, 63, 24]),
        ({"method": "naive"}, [67, 67, 16]),
    ],
)
def test_split_parts_fit_behind_their_prefix(
    manager: Manager, more: dict[str, Any], sizes: list[int]
) -> None:
    service = ContextService(
        manager, method="primed", limit=10, page=16, token_bytes=100, pool=1000
    )
    app = FastAPI()
    install(app, service, Chunks(method="primed"))
    text = "".join(map(chr, range(33, 183)))
    how = {"by": "tokens", "tokens": 1000}
    made = create(TestClient(app), text, split=how, **more)
    assert [context["tokens"] for context in made] == sizes


@pytest.mark.parametrize("message", ["The request queue is full.", "the device is full"])
def test_chunks_are_computed_when_the_queue_is_no_longer_full(
    service: ContextService, manager: Manager, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setattr(prepare, "_PAUSE_S", 0)
    generate, refused = manager.generate_request, []

    async def full(request: GenerateReqInput) -> AsyncIterator[dict[str, Any]]:
        if len(refused) < 5:
            refused.append(request)
            raise HTTPException(503, message)
        async for answer in generate(request):
            yield answer

    monkeypatch.setattr(manager, "generate_request", full)
    if "queue" in message:
        assert len(asyncio.run(service.create(["a", "b", "c"]))) == 3
        assert (len(refused), len(manager.requests)) == (5, 3)
        refused.clear()
        monkeypatch.setattr(prepare, "_BUSY_S", 0)
    with pytest.raises(ExtError, match=message) as raised:
        asyncio.run(service.create(["d"]))
    assert raised.value.status == (503 if "queue" in message else 400)
    assert len(refused) == 1


def test_contexts_are_invisible_to_other_tenants(client: TestClient) -> None:
    (mine,) = create(client, "chunk", cache_salt="mine")
    for query in ("", "?cache_salt=other"):
        unknown = client.get(f"/ext/chunks/ctx-none{query}").json()["error"]["message"]
        found = client.get(f"/ext/chunks/{mine['id']}{query}")
        assert found.status_code == 404
        assert found.json()["error"]["message"] == unknown.replace("ctx-none", mine["id"])
        assert client.get(f"/ext/chunks/list{query}").json() == {"contexts": []}
        for act in ("pin", "unpin"):
            answer = client.post(f"/ext/chunks/{mine['id']}/{act}{query}")
            assert (answer.status_code, answer.json()) == (404, found.json())
    assert client.get(f"/ext/chunks/{mine['id']}?cache_salt=mine").status_code == 200
    assert client.post(f"/ext/chunks/{mine['id']}/pin?cache_salt=mine").json()["pinned"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"chunks": [""]}, "chunk 0 is empty"),
        ({"chunks": ["a", []]}, "chunk 1 is empty"),
        ({"chunks": ["x" * 90]}, "chunk 0 has 90 tokens.*fewer than 100 tokens in total: split"),
        ({"chunks": [[3, 200, -1]]}, r"token ids \[200, -1\]; expected ids below .* 200,"),
        ({"chunks": ["a"], "method": "magic"}, "unknown link method 'magic'"),
        ({"chunks": ["a"], "method": ""}, "unknown link method ''"),
    ],
)
def test_invalid_chunks_are_rejected_with_400(
    client: TestClient, manager: Manager, body: Any, message: str
) -> None:
    answer = client.post("/ext/chunks", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])
    assert manager.requests == []
    assert client.get("/ext/chunks/list").json() == {"contexts": []}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"chunks": []},
        {"chunks": ["a"], "tll": 1},
        {"chunks": [[True]]},
        {"chunks": ["a"], "ttl": True},
    ],
)
def test_malformed_bodies_are_rejected_with_422(client: TestClient, body: Any) -> None:
    assert client.post("/ext/chunks", json=body).status_code == 422


@pytest.mark.parametrize("more", [{"chunks": ["\ud800"]}, {"cache_salt": "\ud800"}])
def test_lone_surrogates_are_rejected_with_422(client: TestClient, more: Any) -> None:
    body = {"chunks": ["a"], **more}
    answer = client.post("/ext/chunks", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 422
    with pytest.raises(ValidationError, match="surrogates not allowed"):
        CreateContexts.model_validate(body)


def test_context_parts_become_marks(client: TestClient) -> None:
    (context,) = create(client, "chunk")
    part = {"type": "ext_context", "id": context["id"]}
    same = {"type": "text", "text": "chunk"}
    text = {"type": "text", "text": "and"}
    chat = {"messages": [{"role": "user", "content": [part, text, same]}, {"content": "plain"}]}
    marks = {"type": "text", "text": mark(context["id"])}
    echoed = client.post("/v1/chat/completions", json=chat).json()
    assert echoed["messages"] == [
        {"role": "user", "content": [marks, text, marks]},
        {"content": "plain"},
    ]
    assert echoed["custom_params"] == {MARKED: True}
    prompt = {"text": [text, part, " and more"], "sampling_params": {"n": 1}}
    echoed = client.post("/generate", json=prompt).json()
    assert echoed["text"] == f"and{mark(context['id'])} and more"
    assert echoed["sampling_params"] == {"n": 1}
    plain = {"messages": [{"role": "user", "content": [text]}]}
    assert client.post("/v1/chat/completions", json=plain).json() == plain
    assert client.post("/generate", json={"text": [text, text]}).json()["text"] == "andand"
    untouched = {"text": ["two", "prompts"]}
    assert client.post("/generate", json=untouched).json() == untouched


def test_marks_become_a_composition(client: TestClient, service: ContextService) -> None:
    (context,) = create(client, "chunk")
    request = GenerateReqInput(
        text=f"a{mark(context['id'])}b",
        sampling_params={"custom_params": {"mine": 1}},
        extra_key="key",
    )
    service.link(request)
    assert request.text is None
    assert request.input_ids == [1, *b"achunkb"]
    assert request.extra_key.startswith("ext:link:")
    assert request.extra_key.endswith(":key")
    params = request.sampling_params["custom_params"]
    assert params["mine"] == 1
    (chunk,) = params["ext_composition"]["chunks"]
    assert (chunk["at"], chunk["length"], list(chunk["recompute"])) == (2, 5, [0, 1])
    chat = GenerateReqInput(input_ids=list(map(ord, f"<a{mark(context['id'])}b")))
    chat.sampling_params = {"custom_params": {MARKED: True}}
    service.link(chat)
    assert chat.input_ids == [*b"<achunkb"]
    assert [*chat.sampling_params["custom_params"]] == ["ext_composition"]
    sampling = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    batch = GenerateReqInput(input_ids=[[1], [2]], sampling_params=sampling)
    service.link(batch)
    assert (batch.input_ids, batch.sampling_params) == ([[1], [2]], sampling)
    plain = GenerateReqInput(text="plain")
    service.link(plain)
    assert (plain.text, plain.input_ids) == ("plain", None)


def test_each_prompt_of_a_list_is_linked(client: TestClient, service: ContextService) -> None:
    (context,) = create(client, "chunk")
    request = GenerateReqInput(
        text=[f"a{mark(context['id'])}b", "plain"],
        sampling_params={"max_new_tokens": 3, "custom_params": {"mine": 1}},
        extra_key=["key", ""],
        return_logprob=True,
        logprob_start_len=7,
    )
    assert [one.id for one in service.link(request)] == [context["id"]]
    assert request.text is None
    assert request.input_ids == [[1, *b"achunkb"], [1, *b"plain"]]
    linked, plain = request.extra_key
    assert linked.startswith("ext:link:")
    assert (linked.endswith(":key"), plain) == (True, "")
    first, second = request.sampling_params
    assert [*first["custom_params"]] == ["mine", "ext_composition"]
    assert second == {"max_new_tokens": 3, "custom_params": {"mine": 1}}
    request.normalize_batch_and_arguments()
    texts = [f"a{mark(context['id'])}b", f"{mark(context['id'])}"]
    with pytest.raises(ExtError, match="logprob_start_len to 5 or more"):
        service.link(GenerateReqInput(text=texts, return_logprob=True, logprob_start_len=[7, 1]))
    with pytest.raises(ExtError, match=r"context .* not found"):
        service.link(GenerateReqInput(text=texts, cache_salt=["", "other"]))


def test_a_marked_chat_without_marks_is_rejected(service: ContextService) -> None:
    chat = GenerateReqInput(
        input_ids=[*b"plain"], sampling_params={"custom_params": {MARKED: True}}
    )
    with pytest.raises(ExtError, match="the prompt of this chat does not contain its contexts"):
        service.link(chat)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"return_logprob": True, "logprob_start_len": 0},
            "logprob_start_len to 6 or more",
        ),
        (
            {"return_logprob": True, "logprob_start_len": [0, 1]},
            "logprob_start_len of .* one int or a list of 1",
        ),
        ({"lora_path": "adapter"}, "not support lora_path: contexts belong to the base"),
        ({"input_ids": [1, 2]}, "not support input_ids: its tokens are"),
        ({"input_embeds": [[0.5]]}, "not support input_embeds: its tokens"),
        ({"session_params": {"id": "s"}}, "not support session_params: a session"),
        ({"sampling_params": [{}, {}]}, "sampling_params of .* one dict or a list of 1"),
        ({"sampling_params": {"custom_params": "x"}}, "custom_params of .* must be an object"),
        (
            {"sampling_params": {"custom_params": {"ext_stored": {"id": "stx-a"}}}},
            "cannot use a stored context; omit ext_stored",
        ),
        ({"token_indices_to_pool": [1]}, "not support token_indices_to_pool: linked"),
        ({"cache_salt": "other"}, "context .* not found"),
    ],
)
def test_invalid_options_of_a_linked_prompt_are_rejected(
    client: TestClient, service: ContextService, more: dict[str, Any], message: str
) -> None:
    (context,) = create(client, "chunk")
    with pytest.raises(ExtError, match=message):
        service.link(GenerateReqInput(text=mark(context["id"]) + "b", **more))


@pytest.mark.parametrize("nothing", [{"lora_path": ""}, {"lora_path": [None]}, {"input_ids": []}])
def test_empty_options_count_as_absent(
    client: TestClient, service: ContextService, nothing: dict[str, Any]
) -> None:
    (context,) = create(client, "chunk")
    request = GenerateReqInput(text=mark(context["id"]) + "b", **nothing)
    assert [one.id for one in service.link(request)] == [context["id"]]


def test_a_prompt_longer_than_the_context_length_is_rejected(
    client: TestClient, service: ContextService
) -> None:
    (context,) = create(client, "x" * 40)
    service.link(GenerateReqInput(text=2 * mark(context["id"]) + "b"))
    with pytest.raises(ExtError, match="exceeds the maximum length of 100 tokens"):
        service.link(GenerateReqInput(text=1000 * mark(context["id"]) + "b"))


def test_the_composed_tokens_of_a_batch_are_limited(
    client: TestClient, service: ContextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "_MOST_TOKENS", 100)
    (context,) = create(client, "x" * 40)
    texts = [mark(context["id"]) + "b"] * 1000
    service.link(GenerateReqInput(text=texts[:2]))
    with (
        mock.patch.object(service.contexts, "get", wraps=service.contexts.get) as get,
        pytest.raises(ExtError, match=r"prompt 2 of 1000: .* up to it have 126 tokens"),
    ):
        service.link(GenerateReqInput(text=texts))
    assert get.call_count == 3
    behind = service.contexts.create([7], method="primed", before=[8] * 100)
    with pytest.raises(ExtError, match=r"prompt 0 of 1: .* have 103 tokens"):
        service.link(GenerateReqInput(text=mark(behind.id) + "b"))


def test_contexts_that_are_not_named_are_put_back_as_text_where_they_cannot_be_linked(
    client: TestClient, service: ContextService, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    (context,) = create(client, "chunk")
    parts = [{"type": "text", "text": text} for text in ("<", "chunk", ">")]

    def asked(**fields: Any) -> GenerateReqInput:
        """Returns the request that SGLang makes of a chat."""
        body = {"messages": [{"role": "user", "content": parts}]}
        body = client.post("/v1/chat/completions", json=body).json()
        text = "".join(part["text"] for part in body["messages"][0]["content"])
        assert text == f"<{mark(context['id'])}>"
        assert body["custom_params"] == {AUTOMATIC: {context["id"]: "chunk"}}
        params = {"custom_params": body["custom_params"]}
        fields = {"input_ids": list(map(ord, text)), **fields}
        return GenerateReqInput(sampling_params=params, **fields)

    def generated(**fields: Any) -> GenerateReqInput:
        body = client.post("/generate", json={"text": parts}).json()
        assert body["text"] == f"<{mark(context['id'])}>"
        return GenerateReqInput(**body, **fields)

    for request in (asked(), generated()):
        assert [one.id for one in service.link(request)] == [context["id"]]
        assert [*request.sampling_params["custom_params"]] == ["ext_composition"]
    for request in (asked(lora_path="adapter"), asked(session_params={"id": "s"})):
        assert service.link(request) == []
        assert request.input_ids == [*b"<chunk>"]
        assert request.sampling_params == {"custom_params": {}}
    request = generated(lora_path="adapter")
    assert service.link(request) == []
    assert (request.text, request.input_ids) == ("<chunk>", None)
    request = asked(input_ids=[*b"dropped by the template"])
    assert service.link(request) == []
    assert request.input_ids == [*b"dropped by the template"]

    requests = asked(), generated()
    service.contexts.delete(context["id"])
    assert [service.link(each) for each in requests] == [[], []]
    assert (requests[0].input_ids, requests[1].text) == ([*b"<chunk>"], "<chunk>")
    (context,) = create(client, "chunk")
    request = asked()
    monkeypatch.setattr(  # tokens that are not those of their text
        manager, "tokenizer", SimpleNamespace(**vars(manager.tokenizer)), raising=False
    )
    manager.tokenizer.encode = lambda text, add_special_tokens: [*map(ord, text), 0]  # noqa: ARG005
    with pytest.raises(ExtError, match="whose tokens decode to its text"):
        service.link(request)
    body = {"messages": [{"role": "user", "content": parts}], "continue_final_message": True}
    assert client.post("/v1/chat/completions", json=body).json()["messages"] == body["messages"]


def test_a_context_that_is_named_is_not_put_back(
    client: TestClient, service: ContextService
) -> None:
    same, named = create(client, "chunk", "other")
    parts = [{"type": "text", "text": "chunk"}, {"type": "ext_context", "id": named["id"]}]
    body = {"messages": [{"role": "user", "content": parts}]}
    body = client.post("/v1/chat/completions", json=body).json()
    params = {"custom_params": body["custom_params"]}
    assert params["custom_params"] == {MARKED: True, AUTOMATIC: {same["id"]: "chunk"}}
    ids = list(map(ord, mark(same["id"]) + mark(named["id"])))
    service.contexts.delete(same["id"])
    request = GenerateReqInput(input_ids=ids, sampling_params=params)
    assert [one.id for one in service.link(request)] == [named["id"]]
    assert request.input_ids == [*b"chunkother"]
    params = {"custom_params": {MARKED: True, AUTOMATIC: {same["id"]: "chunk"}}}
    request = GenerateReqInput(input_ids=ids, sampling_params=params, lora_path="adapter")
    with pytest.raises(ExtError, match="does not support lora_path"):
        service.link(request)


@pytest.mark.parametrize(
    "more",
    [
        {"ext_stored": {"id": "stx-a"}},
        {"custom_params": {"ext_stored": {"id": "stx-a"}}},
        {"sampling_params": {"custom_params": {"ext_stored": {"id": "stx-a"}}}},
        {"input_ids": [1, 2]},
        {"echo": True},
        {"cache_salt": [""]},
        {"sampling_params": [{}]},
        {"sampling_params": {"custom_params": "x"}},
    ],
)
def test_contexts_are_not_linked_unasked_where_they_are_not_supported(
    client: TestClient, more: dict[str, Any]
) -> None:
    create(client, "chunk")
    part = {"type": "text", "text": "chunk"}
    chat = {"messages": [{"role": "user", "content": [part]}], **more}
    assert client.post("/v1/chat/completions", json=chat).json() == chat
    for path, name in (("/generate", "text"), ("/v1/completions", "prompt")):
        answer = client.post(path, json={name: [part], **more}).json()
        assert answer == {name: "chunk", **more}


@pytest.mark.parametrize("ids", [[1 << 40], [[1]], "abc", None, [-1]])
def test_the_marked_parameter_from_a_client_is_rejected(service: ContextService, ids: Any) -> None:
    request = GenerateReqInput(input_ids=ids, sampling_params={"custom_params": {MARKED: True}})
    with pytest.raises(ExtError, match="is reserved for the server; omit it"):
        service.link(request)


def test_marks_in_chats_are_found_escaped_or_unescaped(client: TestClient) -> None:
    (context,) = create(client, "chunk")
    body = {"messages": [{"role": "user", "content": mark(context["id"])}]}
    for ascii_ in (True, False):
        content = json.dumps(body, ensure_ascii=ascii_).encode()
        echoed = client.post("/v1/chat/completions", content=content, headers=JSON).json()
        assert echoed == {**body, "custom_params": {MARKED: True}}
        other = content.replace(context["id"].encode(), b"ctx-none")
        answer = client.post("/v1/chat/completions", content=other, headers=JSON)
        assert answer.status_code == 404


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cache_salt": ["a"]}, "the cache_salt of a prompt with contexts must be a string"),
        ({"custom_params": "x"}, "custom_params must be an object, found 'x'"),
        ({"text": [{"type": "text", "text": None}]}, "a part of a prompt must be a string"),
        (
            {"text": [{"type": "text", "text": "a"}, 5]},
            "a part of a prompt must be a string.* found 5",
        ),
        ({"text": [{"type": "image", "text": "a"}]}, "a part of a prompt must be a string"),
        (
            {"text": [{"type": "ext_context", "id": True}]},
            "the id of a context must be .* found True",
        ),
        ({"text": [{"type": "ext_context"}]}, "the id of a context must be .* found None"),
    ],
)
def test_malformed_parts_are_rejected_with_400(
    client: TestClient, more: dict[str, Any], message: str
) -> None:
    (context,) = create(client, "chunk")
    parts = [{"type": "ext_context", "id": context["id"]}]
    body = {"messages": [{"role": "user", "content": parts}], **more}
    path = "/generate" if "text" in more else "/v1/chat/completions"
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])


def test_bodies_are_read_below_a_root_path(client: TestClient) -> None:
    (context,) = create(client, "chunk")
    body = {"text": [{"type": "ext_context", "id": context["id"]}]}
    below = TestClient(client.app, root_path="/below")
    assert below.post("/below/generate", json=body).json() == {"text": mark(context["id"])}


def test_contexts_stand_in_the_prompt_of_completions(client: TestClient) -> None:
    (context,) = create(client, "chunk")
    part = {"type": "ext_context", "id": context["id"]}
    whole = {"prompt": ["See: ", part, {"type": "text", "text": "Well?"}], "temperature": 0}
    answer = client.post("/v1/completions", json=whole)
    assert answer.json() == {"prompt": f"See: {mark(context['id'])}Well?", "temperature": 0}
    for plain in ("text", ["two", "texts"], [1, 2], [[1], [2]]):
        answer = client.post("/v1/completions", json={"prompt": plain, "user": "ext_context"})
        assert answer.json()["prompt"] == plain
    refused = client.post("/v1/completions", json={**whole, "echo": True})
    assert refused.status_code == 400
    assert "echo does not support" in refused.json()["error"]["message"]
    part["id"] = "ctx-none"
    assert client.post("/v1/completions", json=whole).status_code == 404


@pytest.mark.parametrize("named", [True, False])
def test_bodies_above_the_size_limit_may_not_name_contexts(
    service: ContextService, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setattr("sgl_ext.engine.front.bodies._LARGEST_BODY", 99)
    kind = "ext_context" if named else "text"
    body = json.dumps({"text": [{"type": kind, "id": "ctx-1"}, "x" * 200]}).encode()
    coming = [
        {"type": "http.request", "body": body[:150], "more_body": True},
        {"type": "http.request", "body": body[150:], "more_body": False},
    ]
    passed, sent = [], []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        passed.extend([await receive(), await receive()])

    async def run() -> None:
        waiting = iter(coming)

        async def receive() -> Any:
            return next(waiting)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/generate", "headers": [], "method": "POST"}
        await Parts(app, service.contexts, automatic=True)(scope, receive, send)

    asyncio.run(run())
    assert passed == ([] if named else coming)
    assert [each["status"] for each in sent if "status" in each] == [413] * named


def test_bodies_above_the_size_limit_are_passed_on_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sgl_ext.engine.front.bodies._LARGEST_BODY", 10)
    coming = [{"body": b"0123456789", "more_body": True}] * 2 + [{"body": b"0"}]
    waiting = iter(coming)

    async def receive() -> Any:
        return next(waiting)

    assert asyncio.run(read(receive)) == (coming[:2], b"01234567890123456789", False)
    waiting = iter(coming[2:])
    assert asyncio.run(read(receive)) == (coming[2:], b"0", True)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_an_unknown_context_is_answered_with_404(client: TestClient, path: str) -> None:
    (context,) = create(client, "chunk", cache_salt="mine")
    parts = [{"type": "ext_context", "id": context["id"]}]
    body = {"text": parts, "messages": [{"role": "user", "content": parts}]}
    answer = client.post(path, json=body)
    assert answer.status_code == 404
    assert "create it again" in answer.json()["error"]["message"]
    assert client.post(path, json={**body, "cache_salt": "mine"}).status_code == 200


@pytest.mark.parametrize("levels", [255, 900])
def test_deeply_nested_bodies_are_rejected_with_400(client: TestClient, levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    body = b'{"text": [{"type": "text", "text": "a"}], "custom_labels": ' + deep + b"}"
    answer = client.post("/generate", content=body, headers=JSON)
    assert answer.status_code == 400
    assert "nested too deeply" in answer.json()["error"]["message"]
