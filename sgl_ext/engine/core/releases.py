"""Differences between the supported SGLang releases, one function for each.

The rest of the package is written for all of them, and ``scripts/seams.sh`` checks it without this
module. A difference goes with the last release that it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.hooks import Hook, Original, installed_sglang
from sgl_ext.engine.core.sglang_types import ForwardBatch, Scheduler

_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CACHING = "_sgl_ext_caching"
"""Attribute of SGLang's tree that is True while it caches a part of a request."""

LINKER_BY_NAME = installed_sglang() != "0.5.22"
"""Whether SGLang creates a cache linker from the names of its module and class. 0.5.22 creates only
the linkers that it ships."""
MEDIA_BY_WIDE_HASH = installed_sglang() != "0.5.22"
"""Whether SGLang's keys of prompts hold 62 bits or more of the hash of an image, a video or a
recording. Those of 0.5.22 hold 30 bits, and may be the same for two images."""


def linker_arguments(linker: Mapping[str, str]) -> dict[str, object]:
    """Returns the arguments with which SGLang creates a cache linker of another package.

    Args:
        linker: names of its class (``linker``) and its module (``linker_module_path``).
    """
    enabled: dict[str, object] = {"enable_unified_cache_external_linker": True}
    if LINKER_BY_NAME:
        return enabled | {
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": dict(linker),
        }
    return enabled | {"unified_cache_external_linker_backend": "mooncake"}


def linker_hooks(linker: Mapping[str, str]) -> tuple[Hook, ...]:
    """Returns the hooks that :func:`linker_arguments` need to take effect."""
    if LINKER_BY_NAME:
        return ()
    return (
        Hook(
            "sglang.srt.mem_cache.registry.create_unified_radix_cache",
            "around",
            creates(linker),
            "SGLang 0.5.22 creates only linkers that it ships",
        ),
        Hook(
            f"{_TREE}.checkpoint_into_tree",
            "around",
            caching,
            "SGLang 0.5.22 looks a request up in linkers whenever a part of it is cached",
        ),
        Hook(f"{_TREE}._match_tree", "around", matched, "the same"),
    )


def caching(original: Original, tree: Any, *args: object, **kw: object) -> object:
    """Marks the tree while it caches a part of a request."""
    setattr(tree, _CACHING, True)
    try:
        return original(tree, *args, **kw)
    finally:
        setattr(tree, _CACHING, False)


def matched(original: Original, tree: Any, params: Any) -> object:
    """Matches without a linker while a part of a request is cached.

    A linker that looks the request up again takes it for one that has not been admitted.
    """
    if getattr(tree, _CACHING, False):
        params = replace(params, req=None)
    return original(tree, params)


def creates(linker: Mapping[str, str]) -> Original:
    """Returns a hook that replaces the linker for Mooncake while SGLang creates the radix tree."""

    def create(original: Original, context: Any, *args: object, **kw: object) -> object:
        if (ext := runtime.current) is None or ext.config.tiers is None:
            return original(context, *args, **kw)
        from sglang.srt.mem_cache.storage.mooncake_store import mooncake_direct_linker as shipped

        own = getattr(import_module(linker["linker_module_path"]), linker["linker"])
        replaced = shipped.MooncakeDirectLinker
        stream = context.tp_worker.model_runner.forward_stream
        shipped.MooncakeDirectLinker = partial(own, forward_stream=stream)
        try:
            return original(context, *args, **kw)
        finally:
            shipped.MooncakeDirectLinker = replaced

    return create


def send_abort(scheduler: Scheduler, abort: object, request: object) -> None:
    """Answers a request that ends in the scheduler, outside of the stream of outputs.

    0.5.22 has no method for it, and no such answers in its server in Rust.
    """
    send: Any = getattr(scheduler, "send_abort_output", None)
    if send is None:
        send = scheduler.ipc_channels.send_to_tokenizer.send_output
    send(abort, request)


def forward_context(context: Any, batch: ForwardBatch) -> AbstractContextManager[object]:
    """Returns the block in which layers compute ``batch``.

    In 0.5.22 layers read nothing of the batch from the context.
    """
    from sglang.srt.model_executor import forward_context as sglang

    refers = hasattr(sglang.ForwardContext, "moe_num_token_non_padded")
    return sglang.forward_context(context, **({"forward_batch": batch} if refers else {}))
