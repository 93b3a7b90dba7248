"""What the hooks make of SGLang's own objects, where a server would show it only by its speed."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sgl_ext import runtime
from sgl_ext.engine import tier_hooks
from sgl_ext.engine.tier_linker import TierLinker


class Stack:
    """Says when requests are ready, and keeps what it is told."""

    lower = ("ssd",)

    def __init__(self) -> None:
        self.arrived: set[str] = set()
        self.uses: list[tuple[list[bytes], int]] = []

    def ready(self, rid: str) -> bool:
        return rid in self.arrived

    def used(self, keys: list[bytes], times: int) -> None:
        self.uses.append((keys, times))


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Stack:
    stack = Stack()
    monkeypatch.setattr(runtime, "current", SimpleNamespace(tiers=stack))
    return stack


def test_nobody_gives_way_to_a_request_that_is_held_back(stack: Stack) -> None:
    linker = SimpleNamespace(agreed=lambda value: value)
    cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker))
    adder = SimpleNamespace(tree_cache=cache, can_run_list=[])
    request = SimpleNamespace(rid="r")
    asked: list[Any] = []

    def original(_adder: Any, req: Any, *_args: Any) -> bool:
        asked.append(req)
        return True

    assert tier_hooks._preempt(original, adder, request) is False
    assert tier_hooks._hold_back(original, adder, request, False, None) == AddReqResult.CONTINUE
    assert asked == []
    stack.arrived.add("r")
    assert tier_hooks._preempt(original, adder, request) is True
    assert asked == [request]
    targets = [hook.target for hook in tier_hooks.HOOKS]
    for method in (PrefillAdder.preempt_to_schedule, PrefillAdder.add_one_req):
        assert f"{method.__module__}.{method.__qualname__}" in targets


def test_hits_in_the_device_are_told_at_powers_of_two(stack: Stack) -> None:
    linker = TierLinker.__new__(TierLinker)
    linker.stack, linker._uses = stack, OrderedDict()
    tree = SimpleNamespace(  # node 2 is below node 1
        collect_path_info=lambda ends: [
            [SimpleNamespace(node_id=node) for node in range(1, ends[0] + 1)]
        ],
        get_hash_values=lambda node: [f"0{node}"],
    )
    for end in (1, 2, 1, 1, 2, 1, 1, 2):
        linker.used_in_device(tree, end)
    first, second = b"\x01", b"\x02"
    linker.used_in_device(tree, object())  # the slot of a streaming session
    assert stack.uses == [([first], 2), ([second], 2), ([first], 4), ([first], 8), ([second], 4)]
