"""Chunks in frontend programs, with SGLang's interpreter, recording backends and real contexts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sglang as sgl
from context_kit import ContextServer, context_server
from sglang.lang.backend.base_backend import BaseBackend

from sgl_ext.errors import ExtError, UnknownContextError
from sgl_ext.lang import chunk
from sgl_ext.marks import mark

ID = "ctx-0123456789-_abcdefghij"


class Recorder(BaseBackend):  # type: ignore[misc]
    """Backend that records its prompts and gives the same answer to each."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []
        self.prefixes: list[str] = []

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        self.prompts.append(s.text_)
        return "answer", {}

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        self.prompts.append(s.text_)
        yield from (("ans", {}), ("wer", {}))

    def cache_prefix(self, prefix_str: str) -> None:
        self.prefixes.append(prefix_str)


class Endpoint(Recorder):
    """Recorder that has the URL of a server, as SGLang's ``RuntimeEndpoint`` has."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__()
        self.base_url, self.api_key, self.verify = url, api_key, None


@pytest.fixture
def server() -> Iterator[ContextServer]:
    with context_server() as served:
        yield served


def texts(server: ContextServer) -> list[str | None]:
    return [context.text for context in server.service.contexts.all()]


def only_id(server: ContextServer) -> str:
    (context,) = server.service.contexts.all()
    return context.id


@sgl.function  # type: ignore[untyped-decorator]
def ask(s: Any, document: str, question: str) -> None:
    s += "Read this. " + chunk(document) + question
    s += sgl.gen("answer")


def test_a_context_id_becomes_its_mark() -> None:
    backend = Recorder()
    state = ask.run(ID, " Well?", backend=backend)
    assert state["answer"] == "answer"
    assert backend.prompts == [f"Read this. {mark(ID)} Well?"]


@pytest.mark.parametrize(("use_thread", "stream"), [(True, False), (False, False), (True, True)])
def test_a_text_is_put_into_the_context_cache_once(
    server: ContextServer, use_thread: bool, stream: bool
) -> None:
    backend = Endpoint(server.url)
    for question in (" One?", " Two?"):
        state = ask.run("doc", question, backend=backend, use_thread=use_thread, stream=stream)
        state.sync()
        assert "".join(state.text_iter()).endswith("answer")
    assert texts(server) == ["doc"]
    marked = mark(only_id(server))
    assert backend.prompts == [f"Read this. {marked} One?", f"Read this. {marked} Two?"]


def test_each_backend_has_its_own_contexts(server: ContextServer) -> None:
    with context_server(api_key="secret") as other:
        here, there = Endpoint(server.url), Endpoint(other.url, "secret")
        for backend in (here, there, here, there):
            ask.run("doc", "?", backend=backend).sync()
        assert [texts(server), texts(other)] == [["doc"], ["doc"]]
        assert here.prompts == [f"Read this. {mark(only_id(server))}?"] * 2
        assert there.prompts == [f"Read this. {mark(only_id(other))}?"] * 2


def test_chunks_work_with_the_runtime_endpoint_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    with context_server(api_key="secret") as server:
        backend = sgl.RuntimeEndpoint(server.url, api_key="secret")
        monkeypatch.setattr(sgl.global_config, "default_backend", backend)
        state = ask.run(document="doc", question="?")
        assert state["answer"] == f"Read this. {mark(only_id(server))}?"


def test_each_link_method_has_its_own_context(server: ContextServer) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def program(s: Any) -> None:
        s += chunk("doc") + chunk("doc", "naive") + chunk("doc", method="naive") + "?"
        s += sgl.gen()

    backend = Endpoint(server.url)
    program.run(backend=backend).sync()
    own, naive = server.service.contexts.all()
    assert (own.method, naive.method) == ("lego-2", "naive")
    assert backend.prompts == [mark(own.id) + mark(naive.id) * 2 + "?"]


def test_chunks_work_within_roles_and_forks(server: ContextServer) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def program(s: Any) -> None:
        s += sgl.system(chunk("rules"))
        s += sgl.user("Of this: " + chunk("doc") + " what?")
        branches = s.fork(2)
        for number, branch in enumerate(branches):
            branch += chunk(f"part {number}") + sgl.assistant(sgl.gen("answer"))
        branches.join()

    backend = Endpoint(server.url)
    state = program.run(backend=backend)
    assert state["answer"] == ["answer", "answer"]
    named = {context.text: mark(context.id) for context in server.service.contexts.all()}
    assert set(named) == {"rules", "doc", "part 0", "part 1"}
    start = f"SYSTEM:{named['rules']}\nUSER:Of this: {named['doc']} what?\n"
    parts = [named["part 0"], named["part 1"]]
    assert sorted(backend.prompts) == sorted(f"{start}{part}ASSISTANT:" for part in parts)


def test_a_batch_creates_each_context_once(server: ContextServer) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def program(s: Any, document: str, question: str) -> None:
        s += "These are the rules, which all of the programs of this batch begin with. "
        s += chunk("rules")
        s += chunk(document) + question
        s += sgl.gen("answer")

    backend = Endpoint(server.url)
    arguments = [(f"doc {number % 3}", f" {number}?") for number in range(24)]
    states = program.run_batch(arguments, backend=backend, num_threads=8)
    assert [state["answer"] for state in states] == ["answer"] * 24
    assert sorted(map(str, texts(server))) == ["doc 0", "doc 1", "doc 2", "rules"]
    # The common prefix that SGLang requests before a batch ends before its first chunk.
    assert [prefix.endswith("begin with. ") for prefix in backend.prefixes] == [True]
    assert len(set(backend.prompts)) == 24


def test_a_context_that_the_server_dropped_is_created_again(server: ContextServer) -> None:
    backend = Endpoint(server.url)
    ask.run("doc", "?", backend=backend).sync()
    first = only_id(server)
    server.service.contexts.delete(first)
    ask.run("doc", "?", backend=backend).sync()
    second = only_id(server)
    assert first != second
    assert all(
        mark(id_) in prompt for id_, prompt in zip((first, second), backend.prompts, strict=True)
    )


def test_concurrent_programs_create_one_context_for_a_text(
    server: ContextServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = server.service.create

    async def slowly(*arguments: Any, **more: Any) -> Any:
        await asyncio.sleep(0.5)
        return await create(*arguments, **more)

    monkeypatch.setattr(server.service, "create", slowly)

    @sgl.function  # type: ignore[untyped-decorator]
    def program(s: Any) -> None:
        s += chunk("doc") + "?" + sgl.gen()

    backend = Endpoint(server.url)
    for state in program.run_batch([{}] * 8, backend=backend, num_threads=8):
        assert state.error() is None
    assert backend.prompts == [f"{mark(only_id(server))}?"] * 8


def failed(run: Callable[[], Any]) -> Any:
    """Returns the error of a program, and asserts that SGLang warns of it."""
    with pytest.warns(UserWarning, match="Error in stream_executor"):
        state = run()
        state.sync()
    return state.error()


def test_evaluation_failures_become_errors_of_the_program(server: ContextServer) -> None:
    error = failed(lambda: ask.run("doc", "?", backend=Recorder()))
    assert isinstance(error, ExtError)
    assert "runs on Recorder; create a context and give its id" in str(error)
    backend = Endpoint(server.url)
    error = failed(lambda: ask.run("x" * 1000, "?", backend=backend))
    assert isinstance(error, ExtError)
    assert "chunk 0 has 1000 tokens" in str(error)
    assert not isinstance(error, UnknownContextError)
    # The next program on this backend is not affected.
    assert ask.run("doc", "?", backend=backend)["answer"] == "answer"


def test_invalid_chunks_are_rejected() -> None:
    with pytest.raises(ExtError, match="cannot be empty"):
        chunk("")
    with pytest.raises(ExtError, match=f"{ID} is already prepared .* omit 'naive'"):
        chunk(ID, method="naive")
    with pytest.raises(TypeError, match="a text or the id of a context, found 3"):
        chunk(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="f-string"):
        f"{chunk('text')}"


def test_the_module_imports_neither_torch_nor_sglang() -> None:
    program = "import sys, sgl_ext.lang; print({'torch', 'sglang'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"
