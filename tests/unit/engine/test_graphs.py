"""CUDA graphs: forwards that follow plans or whose attention a power changes run eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.step import forward, graphs, rows
from sgl_ext.engine.step.forward import PlannedForward
from sgl_ext.planning.plan import Compute, PrefillPlan, Span


def replays(batch: Any = None, *, captured: bool = True) -> bool:
    """Returns whether a graph would compute a forward."""
    return graphs._can_run_graph(lambda *_: captured, None, batch)


@pytest.fixture
def ext(monkeypatch: pytest.MonkeyPatch) -> ExtRuntime:
    ext = ExtRuntime(ExtConfig())
    monkeypatch.setattr(runtime, "current", ext)
    return ext


def test_sglang_decides_about_other_forwards(
    ext: ExtRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for current in (ext, None):
        monkeypatch.setattr(runtime, "current", current)
        assert replays()
        assert not replays(captured=False)


def test_a_power_that_changes_the_attention_of_a_forward_makes_it_eager(ext: ExtRuntime) -> None:
    followed = object()
    ext.inside_out = [
        SimpleNamespace(eager=lambda _: False), SimpleNamespace(eager=lambda each: each is followed)
    ]  # fmt: skip
    assert replays(object())
    assert not replays(followed)


@pytest.mark.parametrize("fails", [False, True])
def test_all_parts_of_a_planned_forward_are_eager(
    ext: ExtRuntime, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    ran: list[tuple[str, bool]] = []
    launched: list[tuple[object, bool]] = []

    def original(_runner: object, part: str) -> str:
        assert launched[-1] == (part, True)
        ran.append((part, replays()))
        if fails and part == "rows":
            raise RuntimeError("a forward that fails")
        return "output"

    class Restores:
        """Power that computes a part of a prompt before the forward."""

        def fill(self, *_: object) -> None: ...

        def launching(self, part: object, whole: bool) -> None:
            launched.append((part, whole))

        def eager(self, _: object) -> bool:
            return False

        @contextmanager
        def within(self, planned: PlannedForward, parts: list[Any]) -> Iterator[list[Any]]:
            planned.run("part")  # type: ignore[arg-type]
            yield parts

    monkeypatch.setattr(rows, "split", lambda *_: "rows")
    monkeypatch.setattr(rows, "split_of", lambda *_: "split")
    ext.inside_out = [Restores()]  # type: ignore[list-item]
    ext.plans = {"a": PrefillPlan([Span(0, 8, Compute())])}
    known = SimpleNamespace(extended=lambda _: list(range(4)))
    runner: Any = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(known=known), attn_backend=None
    )
    batch: Any = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True), rids=["a"],
        extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[4], req_pool_indices_cpu=[1],
        seq_lens_cpu=SimpleNamespace(tolist=lambda: [4]),
    )  # fmt: skip
    if fails:
        with pytest.raises(RuntimeError, match="a forward that fails"):
            forward.forward(ext, original, runner, batch)
    else:
        assert forward.forward(ext, original, runner, batch) == "output"
    assert ran == [("part", False), ("rows", False)]
    assert len(launched) == 2
    assert replays()
