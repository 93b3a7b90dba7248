"""Geometry of a model whose contexts are stored."""

from __future__ import annotations

from sglang.srt.layers.radix_attention import AttentionType

from sgl_ext.clusters.geometry import Geometry
from sgl_ext.engine.core.attention_backends import attention_layers, require_own
from sgl_ext.engine.core.sglang_types import Scheduler
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout


def geometry_of(scheduler: Scheduler, layout: Layout, *, on_device: bool = False) -> Geometry:
    """Returns the geometry of the model that a scheduler serves.

    Args:
        layout: layout of the KV pool.
        on_device: whether the KV pool is on a device. If it is not, the attention to it and to
            contexts is one, which the running backend must be.

    Raises:
        ExtError: clusters do not support the model, or the attention backend.
    """
    model = scheduler.tp_worker.model_runner.model
    layers = attention_layers(model)
    shapes = {
        (each.tp_q_head_num, each.tp_k_head_num, each.head_dim, float(each.scaling))
        for each in layers
    }
    if len(layers) != layout.layers or len(shapes) != 1:
        raise ExtError(
            "clusters require one attention layer of the same shape for each KV layer, but the "
            f"model has {len(layers)} attention layers of {len(shapes)} shapes and "
            f"{layout.layers} KV layers; remove the clusters section"
        )
    if getattr(scheduler.model_config, "model_is_mrope", False):
        raise ExtError(
            "clusters do not support positions with several components (mrope), which this model "
            "has; remove the clusters section"
        )
    if any(each.sliding_window_size > -1 or each.logit_cap for each in layers):
        raise ExtError(
            "clusters do not support sliding windows or capped attention logits, which this model "
            "has; remove the clusters section"
        )
    if getattr(scheduler.model_config, "has_attention_sinks", False) or any(
        each.attn_type != AttentionType.DECODER or each.xai_temperature_len > 0 for each in layers
    ):
        raise ExtError(
            "clusters do not support attention with sinks, to later tokens or with a temperature, "
            "which this model has; remove the clusters section"
        )
    ((heads, kv_heads, head_dim, scale),) = shapes
    if not on_device:
        require_own(scheduler.tp_worker.model_runner, layout, scale, "clusters")
    return Geometry(
        layout.layers, heads, kv_heads, head_dim, layout.dtype, scale, layout.fingerprint
    )
