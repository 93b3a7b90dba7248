"""Kinds of attention that the CPU backend does not compute."""

from __future__ import annotations

from sglang.srt.layers.radix_attention import AttentionType

from sgl_ext.engine.core.attention_backends import attention_layers
from sgl_ext.engine.core.sglang_types import ModelRunner, RadixAttention


def unserved(runner: ModelRunner) -> str | None:
    """Returns what the attention of a model requires and the CPU backend lacks; None if nothing."""
    if getattr(runner.model_config, "has_attention_sinks", False):
        return "attention sinks"
    # SGLang has set this only for models whose layers attend within chunks.
    chunked = getattr(runner.model_config, "attention_chunk_size", None) is not None
    layers = attention_layers(runner.model)
    return next((why for each in layers if (why := _lacks(each, chunked=chunked))), None)


def _lacks(layer: RadixAttention, *, chunked: bool) -> str | None:
    kinds = (
        (layer.logit_cap, f"attention logits capped at {layer.logit_cap}"),
        (layer.xai_temperature_len > 0, "an attention temperature by position"),
        (layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL, "attention to later tokens"),
        (
            layer.attn_type == AttentionType.ENCODER_ONLY and layer.sliding_window_size > -1,
            "attention to later tokens within a window",
        ),
        (chunked and layer.use_irope, "attention within chunks of the prompt"),
    )
    return next((what for lacks, what in kinds if lacks), None)
