"""Arguments, models and pools that the slab does not support as SGLang's KV pool."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sgl_ext.engine.core import served
from sgl_ext.engine.core.attention_backends import attention_layers, configured
from sgl_ext.engine.core.served import Property
from sgl_ext.engine.core.sglang_types import KVCacheConfigurator, ModelConfig, ServerArgs
from sgl_ext.memory.slab import DTYPES

_EXPERTS = re.compile(r"(moe_)?(num|n)_(\w+_)?experts")
"""Keys of a model's configuration that count its experts."""


def obstacle_in_arguments(view: ServerArgs) -> str | None:
    """Returns why these resolved arguments require SGLang's own pool; None if the slab can serve.

    Each reason indexes the pool as if a layer were one contiguous buffer, or stores something other
    than K and V of equal width in one of :data:`DTYPES`, or follows KV only where SGLang writes it.
    """
    from sglang.srt.environ import envs

    device = served.device_type(view.device)
    dtype = "bfloat16" if view.kv_cache_dtype == "bf16" else view.kv_cache_dtype
    reasons = (
        (device not in served.SLAB_DEVICES, f"the device {device}"),
        (dtype not in ("auto", *DTYPES), f"KV of type {dtype}"),
        (view.enable_kv_cache_sharding, "--enable-kv-cache-sharding"),
        (envs.SGLANG_USE_HND_KVCACHE.get(), "SGLANG_USE_HND_KVCACHE"),
        (view.enable_memory_saver, "--enable-memory-saver"),
        (view.enable_unified_memory, "--enable-unified-memory"),
        (view.enable_hisparse, "--enable-hisparse"),
        (view.dcp_size > 1, "decode context parallelism"),
        (view.prefill_only_disable_kv_cache, "--prefill-only-disable-kv-cache"),
        (view.disaggregation_mode not in (None, "null"), "prefill-decode disaggregation"),
        (view.kv_canary not in (None, "none"), "--kv-canary"),
    )
    found = next((reason for applies, reason in reasons if applies), None)
    if found is None and device == "cuda":
        found = next(_on_cuda(view), None)
    return found or _unknown_backend(view)


def _on_cuda(view: ServerArgs) -> Iterator[str]:
    """Yields reasons in arguments that apply on CUDA only.

    Some of them are no obstacles in principle, but have not been tried over a slab in GPU memory.
    """
    from sglang.srt.environ import envs

    graphs = view.cuda_graph_config
    reasons = (
        (view.attn_dp_size > 1, "data-parallel attention"),
        (view.tp_size > 1, "tensor parallelism"),
        (view.pp_size > 1, "pipeline parallelism"),
        # Stores to the pool would become functions of copies of it.
        (view.enable_torch_compile, "--enable-torch-compile"),
        # The two halves of a batch have attention backends of their own.
        (view.enable_two_batch_overlap, "--enable-two-batch-overlap"),
        # A prefill is split by layers, around which no forward of a whole model is called.
        (view.enable_pdmux, "--enable-pdmux"),
        # The graph of a whole prefill does not wait for the KV of each layer.
        (graphs is not None and graphs.prefill.backend == "full", "full prefill CUDA graphs"),
        # The pool is created without memory, which it gets once graphs have been captured.
        (envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(), "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    )
    return (f"{reason} on cuda" for applies, reason in reasons if applies)


def _unknown_backend(view: ServerArgs) -> str | None:
    for found in configured(view):
        if found is not None and Property.STRIDED not in found.has:
            return f"the attention backend {found.shown}"
    return None


def obstacle_in_model(view: ServerArgs, model: ModelConfig) -> str | None:
    """Returns why this model requires SGLang's own pool on the device; None if the slab can serve.

    Only models of full precision without experts have been tried on CUDA.
    """
    if served.device_type(view.device) != "cuda":
        return None
    if model.quantization not in (None, "unquant"):
        return f"quantized weights ({model.quantization}) on cuda"
    for config in (model.hf_config, model.hf_text_config):
        for key, value in vars(config).items():
            if _EXPERTS.fullmatch(key) and isinstance(value, int) and value > 0:
                return f"mixtures of experts ({key} {value}) on cuda"
    return None


def obstacle(
    configurator: KVCacheConfigurator, pool_class: type, quant_method: object
) -> str | None:
    """Returns why arguments or model require SGLang's own pool; None if the slab can serve."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import get_context

    view, config = resolving_view(get_context().server_args), configurator.model_config
    if reason := obstacle_in_arguments(view) or obstacle_in_model(view, config):
        return reason
    dtype = str(configurator.kv_cache_dtype).removeprefix("torch.")
    reasons = (
        (pool_class is not MHATokenToKVPool, f"the pool {pool_class.__name__}"),
        (dtype not in DTYPES or quant_method is not None, f"KV of type {dtype}"),
        (config.v_head_dim != config.head_dim, "values whose head_dim differs from that of keys"),
        # SGLang keeps the KV of some of these models in a pool of full attention.
        (
            any(each.sliding_window_size > -1 for each in attention_layers(configurator.model)),
            "sliding windows",
        ),
        (configurator.kv_shard_rank is not None, "--enable-kv-cache-sharding"),
        (configurator.post_capture_kv_active, "a pool that is sized after graph capture"),
    )
    return next((reason for applies, reason in reasons if applies), None)
