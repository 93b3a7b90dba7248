"""SGLang's prefix tree over any allocator, without an engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_ext.engine.core.sglang_types import Allocator


def prefix_tree(allocator: Allocator, **parameters: object) -> UnifiedRadixCache:
    """Returns an empty tree, which frees the slots that it evicts to ``allocator``.

    Args:
        parameters: further parameters of ``CacheInitParams``.
    """
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=allocator.page_size,
            tree_components=(ComponentType.FULL,),
            **parameters,
        )
    )


def key_of(tokens: Iterable[int]) -> RadixKey:
    return RadixKey(array("q", tokens), None)


def insert(tree: UnifiedRadixCache, tokens: Iterable[int], slots: torch.Tensor) -> None:
    """Inserts ``tokens``, whose KV is in ``slots``.

    Args:
        slots: int64 ``[tokens]``, whole pages of the tree's allocator.
    """
    tree.insert(InsertParams(key=key_of(tokens), value=slots))
