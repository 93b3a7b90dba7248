"""Tests of the renewal of contexts, which recomputes evicted KV that prompts use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sgl_ext.chunks.contexts import Context, Contexts
from sgl_ext.engine.chunks.renewal import Renewal
from sgl_ext.errors import ExtError


class Server:
    """Server that computes one context at a time, and lists the results in ``computed``."""

    def __init__(self) -> None:
        self.contexts = Contexts(100, lambda: 0.0)
        self.renewal = Renewal(self.compute, lambda context: context.id in self.contexts)
        self.computed: list[Context] = []
        self.at_once = 0
        self.fails: Callable[[Context], bool] = lambda _: False

    def create(self) -> Context:
        return self.contexts.create([1, 2], method="naive")

    async def compute(self, context: Context) -> None:
        self.at_once += 1
        assert self.at_once == 1
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.fails(context):
            raise ExtError("no room")
        self.computed.append(context)

    async def settle(self) -> None:
        while self.renewal._task is not None and not self.renewal._task.done():
            await asyncio.sleep(0)


def play(scene: Callable[[Server], object]) -> None:
    async def run() -> None:
        await scene(Server())  # type: ignore[misc]

    asyncio.run(run())


def test_a_missed_context_is_computed_once() -> None:
    async def scene(server: Server) -> None:
        one, two, three = (server.create() for _ in range(3))
        server.renewal.answered([three], missing=False)
        for contexts in ([one], [one, two], [two]):
            server.renewal.answered(contexts, missing=True)
        await server.settle()
        assert server.computed == [one, two]

    play(scene)


def test_an_unused_renewed_context_waits_for_a_second_miss() -> None:
    async def scene(server: Server) -> None:
        context = server.create()

        async def miss() -> int:
            server.renewal.answered([context], missing=True)
            await server.settle()
            return len(server.computed)

        assert [await miss() for _ in range(4)] == [1, 1, 2, 2]
        server.renewal.answered([context], missing=True)
        await server.settle()
        server.renewal.answered([context], missing=False)  # a prompt has found it
        assert await miss() == 4

    play(scene)


def test_a_pinned_context_is_computed_after_every_miss() -> None:
    async def scene(server: Server) -> None:
        pinned = server.contexts.pin(server.create().id, pinned=True)
        other = server.create()
        for _ in range(3):
            server.renewal.answered([pinned, other], missing=True)
            await server.settle()
        assert server.computed == [pinned, other, pinned, pinned, other]

    play(scene)


def test_a_context_is_computed_without_a_miss_when_asked_for() -> None:
    async def scene(server: Server) -> None:
        one, two = server.create(), server.create()
        for context in (one, two, one):
            server.renewal.renew(context)
        await server.settle()
        assert server.computed == [one, two]

    play(scene)


def test_a_deleted_context_is_not_computed() -> None:
    async def scene(server: Server) -> None:
        one, two = server.create(), server.create()
        server.renewal.answered([one, two], missing=True)
        server.contexts.delete(one.id)
        await server.settle()
        assert server.computed == [two]
        server.contexts.delete(two.id)
        server.renewal.answered([server.create()], missing=True)
        await server.settle()
        assert two.id not in server.renewal._unused

    play(scene)


def test_a_failed_renewal_does_not_prevent_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(server: Server) -> None:
        one, two = server.create(), server.create()
        server.fails = lambda context: context is one
        server.renewal.answered([one, two], missing=True)
        await server.settle()
        assert server.computed == [two]
        assert f"{one.id} was not renewed: no room" in caplog.text
        server.fails = lambda _: False
        server.renewal.answered([one], missing=True)
        await server.settle()
        assert server.computed == [two, one]

    play(scene)
