"""Hooks that install the slab and the block groups as SGLang's KV pool and allocator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.activation import refuse
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import KVCacheConfigurator, ScheduleBatch
from sgl_ext.engine.kv.obstacles import obstacle
from sgl_ext.memory.backing import Backing
from sgl_ext.memory.fingerprint import fingerprint, joint
from sgl_ext.memory.slab import HostSlab, SlabError

_OWNER = "_ext_allocator"
"""Attribute of SGLang's request pool that holds the allocator to notify when a row is freed."""


_NOT_OF_THE_MODEL = (
    "_name_or_path", "transformers_version",
    # SGLang adds these on a CPU, before it pads the heads for tensor parallelism.
    "original_num_attention_heads", "original_total_num_kv_heads",
)  # fmt: skip


def _identity(configurator: KVCacheConfigurator) -> dict[str, object]:
    """Returns the properties that determine KV besides the weights.

    They are the model's configuration and this rank's share of the model.
    """
    from sglang.srt.runtime_context import get_parallel

    config = json.loads(configurator.model_config.hf_config.to_json_string(use_diff=False))
    parallel = get_parallel()
    return {
        "config": {key: config[key] for key in config if key not in _NOT_OF_THE_MODEL},
        "tensor_parallel": [parallel.attn_tp_rank, parallel.attn_tp_size],
        "layers": [configurator.layer_info.start_layer, configurator.layer_info.end_layer],
    }


def _of_all_ranks(own: str) -> str:
    """Returns the fingerprint of this rank's KV, given that of its own share of the weights.

    KV depends on the weights of earlier pipeline stages, and of all tensor-parallel ranks.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    for group in (parallel.tp_group, parallel.pp_group):
        if group.world_size > 1:
            every: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(every, own, group=group.cpu_group)
            own = joint(own, every)
    return own


def _build_pool(
    original: Original,
    configurator: KVCacheConfigurator,
    *,
    max_total_num_tokens: int,
    mha_pool_class: type,
    quant_method: object = None,
) -> object:
    def build(pool_class: Callable[..., object]) -> Any:
        return original(
            configurator,
            max_total_num_tokens=max_total_num_tokens,
            mha_pool_class=pool_class,
            quant_method=quant_method,
        )

    # A speculative draft has a pool of its own beside the model's; it remains SGLang's pool.
    if (ext := runtime.current) is None or configurator.is_draft_worker:
        return build(mha_pool_class)
    if (layout := ext.config.memory.layout) == "layer_major":
        return build(mha_pool_class)
    if layout == "auto" and not ext.config.sections() and configurator.device == "cuda":
        ext.layer_major_because = "no section needs the block-major KV layout"
        return build(mha_pool_class)
    if reason := obstacle(configurator, mha_pool_class, quant_method):
        _require_no_slab(ext, reason)
        return build(mha_pool_class)
    from sgl_ext.engine.kv.pool import SlabKVPool

    identity = _of_all_ranks(fingerprint(configurator.model, _identity(configurator)))
    peer = ext.config.peer
    borrows = (peer.capacity or 0) if peer is not None and peer.role == "master" else 0
    try:
        pool = build(
            partial(SlabKVPool, fingerprint=identity, borrows=borrows, shared=peer is not None)
        )
    except SlabError as error:
        refuse(hooks.ActivationError(str(error)))
    ext.slab = pool.slab
    return pool


def _require_no_slab(ext: runtime.ExtRuntime, reason: str) -> None:
    """Records why SGLang's own pool serves; refuses the start if the slab was asked for."""
    if ext.config.memory.layout == "block_major":
        refuse(
            hooks.ActivationError(
                f'the block-major KV layout does not support {reason}; remove "layout", or set it '
                'to "layer_major"'
            )
        )
    ext.layer_major_because = f"the KV slab does not support {reason}"


def _pools_built(pools: Any, configurator: KVCacheConfigurator, **_kw: object) -> object:
    """Records why there is no slab, whichever of SGLang's pools is in its place."""
    ext = runtime.current
    if ext is None or configurator.is_draft_worker or ext.slab is not None:
        return pools
    if ext.config.memory.layout == "layer_major":
        ext.layer_major_because = "the configuration selects the layer-major layout"
    elif ext.layer_major_because is None:
        # Models with MLA, sliding windows, recurrent state or a sparse index have other pools.
        model = ", ".join(configurator.model_config.hf_config.architectures or ())
        pool = type(pools.token_to_kv_pool).__name__
        _require_no_slab(ext, f"the pool {pool} of {model or 'this model'}")
    return pools


def _build_allocator(
    original: Original, configurator: KVCacheConfigurator, **kwargs: object
) -> Any:
    allocator = original(configurator, **kwargs)
    pool = kwargs["token_to_kv_pool"]
    slab = getattr(pool, "slab", None)
    if (ext := runtime.current) is None or slab is None:
        return allocator
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if type(allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
        refuse(
            hooks.ActivationError(
                "the block-major KV layout does not support the allocator "
                f'{type(allocator).__name__}; set {{"memory": {{"layout": "layer_major"}}}}'
            )
        )
    from sgl_ext.engine.kv.allocator import BlockGroupAllocator

    ours = BlockGroupAllocator(
        allocator.size, allocator.page_size, allocator.dtype, allocator.device, pool,
        allocator.need_sort, expected_tokens=ext.config.memory.first_group,
        beyond=slab.blocks - slab.own,
    )  # fmt: skip
    setattr(kwargs["req_to_token_pool"], _OWNER, ours)
    if isinstance(slab, HostSlab):
        ours.on_allocate = Backing(slab).need
    return ours


def _serving_extend(original: Original, batch: ScheduleBatch) -> object:
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not hasattr(allocator, "serving"):
        return original(batch)

    def owners() -> tuple[Sequence[int], Sequence[int]]:
        return [req.kv.req_pool_idx for req in batch.reqs], batch.extend_lens

    with allocator.serving(owners):
        return original(batch)


def _serving_decode(original: Original, batch: ScheduleBatch, token_per_req: int) -> object:
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not hasattr(allocator, "serving"):
        return original(batch, token_per_req)
    rows = batch.req_pool_indices_cpu.tolist()
    with allocator.serving(lambda: (rows, [token_per_req] * len(rows))):
        return original(batch, token_per_req)


def _rows_freed(request_pool: object, indices: Sequence[int]) -> None:
    allocator = getattr(request_pool, _OWNER, None)
    if allocator is not None:
        allocator.close_rows(indices)


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
HOOKS = (
    hooks.Hook(
        f"{_CONFIGURATOR}._build_mha_kv_pool",
        "around",
        _build_pool,
        "SGLang uses a platform's pool class only on out-of-tree platforms, and there also for "
        "parts of composite pools",
    ),
    hooks.Hook(
        f"{_CONFIGURATOR}._init_pools",
        "after",
        _pools_built,
        "SGLang builds each kind of pool in a separate method",
    ),
    hooks.Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        "around",
        _build_allocator,
        "SGLang uses a platform's allocator class only for pages of more than one token",
    ),
    hooks.Hook(
        "sglang.srt.mem_cache.allocation.alloc_for_extend",
        "around",
        _serving_extend,
        "allocators do not receive the requests that they allocate slots for",
    ),
    hooks.Hook(
        "sglang.srt.mem_cache.allocation.alloc_for_decode",
        "around",
        _serving_decode,
        "allocators do not receive the requests that they allocate slots for",
    ),
    hooks.Hook(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows",
        "before",
        _rows_freed,
        "the request pool reports rows that are allocated, but not rows that are freed",
    ),
)
