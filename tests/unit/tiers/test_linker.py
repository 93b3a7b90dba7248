"""Tests of the tier linker: the uses that it counts, and the KV that it does not store."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req

from sgl_ext.engine.tiers.hooks import _offloading
from sgl_ext.engine.tiers.linker import TierLinker
from sgl_ext.engine.tiers.power import TiersPower


class Stack:
    """Fake tier stack that records the reported uses."""

    def __init__(self) -> None:
        self.uses: list[tuple[list[bytes], int]] = []

    def used(self, keys: list[bytes], times: int) -> None:
        self.uses.append((keys, times))


def test_uses_on_the_device_are_reported_at_powers_of_two() -> None:
    stack = Stack()
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


@pytest.mark.parametrize(
    ("fields", "pages"),
    [
        ({}, 2),  # the last of its 64 tokens is computed in any case
        ({"return_logprob": True, "logprob_start_len": 40}, 1),
        ({"return_logprob": True, "logprob_start_len": 0}, 0),
        ({"positional_embed_overrides": object()}, 0),
    ],
)
def test_pages_that_sglang_must_not_take_are_not_looked_up(
    fields: dict[str, Any], pages: int
) -> None:
    """A cache-aware schedule policy looks up all pages of a prompt, the first one on the device."""
    linker: Any = TierLinker.__new__(TierLinker)
    linker._page, linker._ranks, linker.restoring = 16, None, None
    asked: list[int] = []

    def lookup(_rid: str, keys: list[bytes], _begin: int) -> int:
        asked.append(len(keys))
        return len(keys)

    linker.prefixes = SimpleNamespace(lookup=lookup, matching=lambda _rid: None)
    power: Any = TiersPower.__new__(TiersPower)
    power.linker, power._wrapper = linker, SimpleNamespace(hit_markers={})
    req: Any = SimpleNamespace(
        rid="r", origin_input_ids=[0] * 60, output_ids=[0] * 4, full_untruncated_fill_ids=[],
        positional_embed_overrides=None, return_logprob=False, logprob_start_len=-1,
        dllm_config=None, is_dllm=lambda: False,
    )  # fmt: skip
    req._compute_max_prefix_len = lambda tokens: Req._compute_max_prefix_len(req, tokens)
    vars(req).update(fields)
    power.matching(req, 16)
    assert linker.lookup("r", [SimpleNamespace(keys=["00" * 32] * 3)]) == [pages]
    assert asked == [pages] * bool(pages)  # not even asked without a page


def test_kv_for_one_use_is_not_stored() -> None:
    linker: Any = TierLinker.__new__(TierLinker)
    linker.before = ()
    keys = {1: "ext:once:recorded:a", 2: None, 3: "tenant"}
    tree: Any = SimpleNamespace(
        tree_core=SimpleNamespace(prefetch_anchor_info=lambda node: (keys[node], "salt")),
        get_prefix_hash_values=lambda _node: [],
    )
    found = {}
    for node in keys:
        _offloading(SimpleNamespace(cache_linker=linker, cache=tree), node, None)  # type: ignore[arg-type]
        found[node] = linker.used_once
    assert found == {1: True, 2: False, 3: False}
    linker.used_once = True
    assert linker.offload([]) is False
