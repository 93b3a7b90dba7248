"""Client of the context cache, against its real routes over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
import requests
from context_kit import ContextServer, context_server

from sgl_ext.client import ContextCache, ContextInfo, part, with_scheme
from sgl_ext.errors import ExtError, UnknownContextError
from sgl_ext.marks import mark


@pytest.fixture(scope="module")
def server() -> Iterator[ContextServer]:
    with context_server() as served:
        yield served


@pytest.fixture
def cache(server: ContextServer) -> Iterator[ContextCache]:
    cache = ContextCache(f"{server.url}/", timeout=10)
    yield cache
    for context in cache.list():
        cache.delete(context.id)


def test_contexts_are_created_listed_and_deleted(
    cache: ContextCache, server: ContextServer
) -> None:
    text, ids = cache.create(["chunk", [5, 6, 7]], ttl=60)
    assert text == ContextInfo(text.id, 5, 500, "lego-2", text.expires_in)
    assert text.expires_in is not None
    assert 0 < text.expires_in <= 60
    assert (ids.tokens, server.service.contexts.get(ids.id).tokens) == (3, (5, 6, 7))
    (alone,) = cache.create("alone", method="naive")
    assert (alone.tokens, alone.method, alone.expires_in) == (5, "naive", None)
    assert cache.get(alone.id) == alone
    assert [context.id for context in cache.list()] == [text.id, ids.id, alone.id]
    cache.delete(text.id)
    assert [context.id for context in cache.list()] == [ids.id, alone.id]


def test_contexts_are_pinned_and_unpinned(cache: ContextCache) -> None:
    one, two, three = cache.create(["a", "b", "c"])
    pinned = cache.pin(one.id)
    assert pinned == ContextInfo(one.id, 1, 100, "lego-2", None, pinned=True)
    cache.pin(two.id)
    with pytest.raises(ExtError, match="the maximum of 2 pinned contexts"):
        cache.pin(three.id)
    assert cache.unpin(one.id) == one
    assert cache.pin(three.id).pinned
    assert [(each.id, each.pinned) for each in cache.list()] == [
        (two.id, True), (one.id, False), (three.id, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "act", [ContextCache.get, ContextCache.delete, ContextCache.pin, ContextCache.unpin]
)
@pytest.mark.parametrize("id_", ["ctx-none", "a?b#é %", "a/b", "a/pin"])
def test_unknown_contexts_raise(
    cache: ContextCache, act: Callable[[ContextCache, str], object], id_: str
) -> None:
    with pytest.raises(UnknownContextError, match=re.escape(f"context {id_!r} not found: ")):
        act(cache, id_)


def test_contexts_are_visible_to_their_own_tenant_only(
    cache: ContextCache, server: ContextServer
) -> None:
    mine = ContextCache(server.url, cache_salt="my & own")
    (context,) = mine.create(["chunk"])
    assert [found.id for found in mine.list()] == [context.id]
    assert mine.get(context.id).id == context.id
    for theirs in (cache, ContextCache(server.url, cache_salt="other")):
        assert theirs.list() == ()
        for act in (theirs.get, theirs.delete, theirs.pin, theirs.unpin):
            with pytest.raises(UnknownContextError):
                act(context.id)
    mine.delete(context.id)


def test_create_sends_only_the_given_arguments(cache: ContextCache, server: ContextServer) -> None:
    split = {"by": "tokens", "tokens": 2}
    cache.create(["chunk"])
    ContextCache(server.url, cache_salt="s").create(
        [[1, 2]], method="naive", prefix="So", ttl=3, split=split
    )
    sent = [json.loads(body) for asked, body in server.requests[-2:] if asked.startswith("POST")]
    assert sent == [
        {"chunks": ["chunk"]},
        {
            "chunks": [[1, 2]],
            "method": "naive",
            "prefix": "So",
            "ttl": 3,
            "split": split,
            "cache_salt": "s",
        },
    ]


def test_server_accepts_the_parts_that_name_contexts(
    cache: ContextCache, server: ContextServer
) -> None:
    (context,) = cache.create(["chunk"])
    for named in (part(context), part(context.id)):
        body = {"text": [named, {"type": "text", "text": "and"}]}
        echoed = requests.post(f"{server.url}/generate", json=body, timeout=10).json()
        assert echoed["text"] == mark(context.id) + "and"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": [""]}, "^chunk 0 is empty; omit it, or give it at least one token$"),
        ({"chunks": ["a", [3, 999]]}, "^chunk 1 has the token ids"),
        ({"chunks": ["a"], "method": "magic"}, "^unknown link method 'magic'"),
        ({"chunks": []}, "/ext/chunks answered 422: .*at least 1 item"),
        ({"chunks": ["a"], "ttl": -1}, "answered 422: .*greater than 0"),
    ],
)
def test_refusals_of_the_server_raise_with_its_reason(
    cache: ContextCache, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExtError, match=message) as caught:
        cache.create(**arguments)
    assert not isinstance(caught.value, UnknownContextError)


def test_requests_need_the_api_key_of_the_server() -> None:
    with context_server(api_key="secret") as server:
        assert ContextCache(server.url, "secret").list() == ()
        for key in (None, "guessed"):
            with pytest.raises(ExtError, match="answered 401: Unauthorized"):
                ContextCache(server.url, key).list()


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields the URL of a server of another kind, which answers all GET requests alike."""
    status, body = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((404, b'{"detail": "Not Found"}'), "start the server with --enable-ext"),
        ((404, b"<html>"), "start the server with --enable-ext"),
        ((400, b'{"object": "error", "message": "no such thing"}'), "answered 400: no such thing"),
        ((500, b"Internal Server Error"), "answered 500: Internal Server Error"),
        ((200, b"<html>"), "an answer that is not a context-cache response"),
        ((200, b'{"contexts": [{"id": 3}]}'), "not a context-cache response: Expected `str`"),
    ],
    indirect=["other"],
)
def test_answers_of_other_servers_raise(other: str, message: str) -> None:
    with pytest.raises(ExtError, match=message) as caught:
        ContextCache(other).list()
    assert not isinstance(caught.value, UnknownContextError)


def test_an_unreachable_server_raises() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as taken:
        url = f"http://127.0.0.1:{taken.server_port}"
    with pytest.raises(ExtError, match=f"no answer from {url}.*is a server running there"):
        ContextCache(url).list()


@pytest.mark.parametrize("url", ["host:30000", "http://host:30000/", "http://host:30000/v1/"])
def test_urls_of_openai_clients_name_the_server(url: str) -> None:
    assert with_scheme(url) == "http://host:30000"


def test_a_certificate_that_is_not_trusted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise requests.exceptions.SSLError("CERTIFICATE_VERIFY_FAILED")

    monkeypatch.setattr(requests, "request", refused)
    with pytest.raises(ExtError, match="CERTIFICATE_VERIFY_FAILED; set REQUESTS_CA_BUNDLE"):
        ContextCache("https://host").list()
