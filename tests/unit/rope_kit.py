"""Rotary embeddings of SGLang's models."""

from __future__ import annotations

import torch
from sglang.srt.layers.rotary_embedding import RotaryEmbedding


def tables() -> dict[str, RotaryEmbedding]:
    """Returns the static embeddings that SGLang serves for Llama and Qwen, by name."""
    from sglang.srt.layers.rotary_embedding import base, rope_variant, yarn

    fp32 = torch.float32
    return {
        "plain": RotaryEmbedding(64, 64, 8192, 100_000, True, fp32),
        "half": RotaryEmbedding(128, 64, 4096, 10_000, False, fp32),
        "linear": base.LinearScalingRotaryEmbedding(64, 64, 4096, 10_000, True, 4.0, fp32),
        "llama3": rope_variant.Llama3RotaryEmbedding(
            128, 128, 8192, 500_000, True, fp32, 8.0, 1.0, 4.0, 8192
        ),
        "yarn": yarn.YaRNScalingRotaryEmbedding(64, 64, 4096, 1_000_000, True, 4.0, fp32),
    }
