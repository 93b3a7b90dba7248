"""Rotary embedding of the served model."""

from __future__ import annotations

from typing import Any

import torch

from sgl_ext.errors import ExtError
from sgl_ext.memory.rope import Rope, frequencies_of

_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Model classes in which every layer rotates its keys and queries by the same embedding."""


def require_architecture(name: str) -> None:
    """Raises ExtError for a model class whose layers may rotate keys differently."""
    if name not in _ARCHITECTURES:
        raise ExtError(
            f"the models {', '.join(sorted(_ARCHITECTURES))} are supported, not {name}, because "
            "the layers of other models may rotate keys differently"
        )


def embedding_of(model: torch.nn.Module) -> Any:
    """Returns the rotary embedding of all layers of a model, one of SGLang's modules.

    Raises:
        ExtError: the layers may have several.
    """
    require_architecture(type(model).__name__)
    found = {id(module): module for module in model.modules() if hasattr(module, "cos_sin_cache")}
    if len(found) != 1:
        raise ExtError(
            f"one rotary embedding for all layers is required, but this model has {len(found)}"
        )
    (embedding,) = found.values()
    return embedding


def rope_of(embedding: Any) -> Rope:
    """Returns the rotations of a rotary embedding.

    Raises:
        ExtError: the embedding is not static.
    """
    # Recomputed, because the table in use may be rounded to the model's dtype.
    table = embedding._compute_cos_sin_cache().float().cpu().numpy()
    try:
        frequencies = frequencies_of(table)
    except ValueError as error:
        raise ExtError(str(error)) from None
    return Rope(embedding.rotary_dim, frequencies, not embedding.is_neox_style)
