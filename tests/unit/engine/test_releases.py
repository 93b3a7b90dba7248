"""Differences between the supported SGLang releases, on the installed one."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage.mooncake_store import mooncake_direct_linker as shipped
from sglang.srt.model_executor.forward_context import ForwardContext, get_forward_context
from sglang.srt.server_args import ServerArgs

from sgl_ext import SUPPORTED_SGLANG
from sgl_ext.config import load
from sgl_ext.engine.core import hooks, releases, runtime
from sgl_ext.engine.tiers.hooks import LINKER
from sgl_ext.engine.tiers.linker import TierLinker

CONTEXT: Any = SimpleNamespace(
    tp_worker=SimpleNamespace(model_runner=SimpleNamespace(forward_stream="stream"))
)


def create(context: Any) -> Any:
    """Creates a linker as SGLang 0.5.22 does."""
    return shipped.MooncakeDirectLinker


def tiers_are(monkeypatch: pytest.MonkeyPatch, section: object) -> None:
    config = SimpleNamespace(tiers=section)
    monkeypatch.setattr(runtime, "current", SimpleNamespace(config=config))


def test_the_installed_release_is_supported() -> None:
    assert hooks.installed_sglang() in SUPPORTED_SGLANG


def test_the_arguments_of_a_linker_exist() -> None:
    names = {*ServerArgs.__annotations__}
    given = releases.linker_arguments(LINKER)
    assert given["enable_unified_cache_external_linker"] is True
    assert {*given} <= names
    assert ("unified_cache_external_linker_config" in names) == releases.LINKER_BY_NAME


def test_the_width_of_the_keys_of_images_is_known() -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_hash((1 << 64) - 1)
    first = item.pad_value
    item.set_hash((1 << 30) - 1)  # has the same lowest 30 bits
    assert (item.pad_value != first) == releases.MEDIA_BY_WIDE_HASH


def test_the_target_of_the_linkers_hook_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "LINKER_BY_NAME", False)
    found = releases.linker_hooks(LINKER)
    assert len(found) == 3
    assert all(callable(pkgutil.resolve_name(hook.target)) for hook in found)
    monkeypatch.setattr(releases, "LINKER_BY_NAME", True)
    assert releases.linker_hooks(LINKER) == ()


def test_the_hook_replaces_the_linker_while_the_tree_is_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, hook = shipped.MooncakeDirectLinker, releases.creates(LINKER)
    tiers_are(monkeypatch, load({"tiers": {"host": {"capacity": "1GiB"}}}).tiers)
    made = hook(create, CONTEXT)
    assert (made.func, made.keywords) == (TierLinker, {"forward_stream": "stream"})
    assert shipped.MooncakeDirectLinker is own

    def fail(_context: object) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        hook(fail, CONTEXT)
    assert shipped.MooncakeDirectLinker is own


def test_other_servers_get_the_linker_that_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = releases.creates(LINKER)
    tiers_are(monkeypatch, None)
    assert hook(create, CONTEXT) is shipped.MooncakeDirectLinker
    monkeypatch.setattr(runtime, "current", None)
    assert hook(create, CONTEXT) is shipped.MooncakeDirectLinker


def test_a_request_is_not_looked_up_while_a_part_of_it_is_cached() -> None:
    tree, seen = SimpleNamespace(), []

    def match(_tree: object, params: MatchPrefixParams) -> None:
        seen.append(params.req)

    def cache(tree: object, *, fails: bool) -> None:
        releases.matched(match, tree, params)
        if fails:
            raise LookupError

    key, request = RadixKey([1, 2]), SimpleNamespace()
    params: Any = MatchPrefixParams(key=key, req=request)
    releases.matched(match, tree, params)
    releases.caching(cache, tree, fails=False)
    with pytest.raises(LookupError):
        releases.caching(cache, tree, fails=True)
    releases.matched(match, tree, params)
    assert seen == [request, None, None, request]


def test_an_abort_is_sent_once() -> None:
    sent: list[object] = []

    def send(abort: object, request: object) -> None:
        sent.append((abort, request))

    def other(*_: object) -> None:
        raise AssertionError

    newer: Any = SimpleNamespace(
        send_abort_output=send,
        ipc_channels=SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=other)),
    )
    releases.send_abort(newer, "abort", "request")
    older: Any = SimpleNamespace(
        ipc_channels=SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=send))
    )
    releases.send_abort(older, "abort", "request")
    assert sent == [("abort", "request")] * 2


def test_layers_find_the_attention_backend_and_the_batch() -> None:
    batch: Any = SimpleNamespace(moe_num_token_non_padded=lambda: "bound")
    with releases.forward_context(ForwardContext(attn_backend="backend"), batch):
        found = get_forward_context()
        assert found.attn_backend == "backend"
        if hasattr(found, "moe_num_token_non_padded"):
            assert found.moe_num_token_non_padded() == "bound"
