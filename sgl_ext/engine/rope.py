"""How a served model rotates its keys."""

from __future__ import annotations

from typing import Any

import torch

from sgl_ext.chunks.rotation import Rope, frequencies_of
from sgl_ext.engine import hooks

_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Every layer of these rotates its keys, by one embedding."""


def rope_of(model: torch.nn.Module) -> Rope:
    """The rotary embedding of all layers.

    Raises:
        ActivationError: a model whose keys cannot be moved by one rotation.
    """
    name = type(model).__name__
    if name not in _ARCHITECTURES:
        raise hooks.ActivationError(
            f"chunks are served for {', '.join(sorted(_ARCHITECTURES))}, not for {name}: in other "
            "models layers differ in how they rotate keys; leave the chunks section out"
        )
    found = {id(module): module for module in model.modules() if hasattr(module, "cos_sin_cache")}
    if len(found) != 1:
        raise hooks.ActivationError(
            f"chunks need one rotary embedding for all layers, and this model has {len(found)}; "
            "leave the chunks section out"
        )
    embedding: Any
    (embedding,) = found.values()
    # The table that it uses may have been rounded to the model's dtype.
    table = embedding._compute_cos_sin_cache().float().cpu().numpy()
    try:
        frequencies = frequencies_of(table)
    except ValueError as error:
        raise hooks.ActivationError(f"{error}; leave the chunks section out") from None
    return Rope(embedding.rotary_dim, frequencies, not embedding.is_neox_style)
