"""Options of SGLang that the extension or a power does not serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.sglang_types import ServerArgs

Unserved = tuple[tuple[str, Callable[[Any], bool], str], ...]
"""Fields of ``ServerArgs``, each with a test for unserved values and a name for error messages."""

COMMON: Unserved = (
    ("enable_hierarchical_cache", bool, "HiCache"),
    ("radix_cache_backend", bool, "another radix cache"),
    ("disable_radix_cache", bool, "a disabled radix cache"),
    ("speculative_algorithm", bool, "speculative decoding"),
    ("attn_cp_size", lambda size: size > 1, "context parallelism"),
)
"""Options that no power over SGLang's radix cache serves."""

PIPELINE: Unserved = (("pp_size", lambda size: size > 1, "pipeline parallelism"),)

LORA: Unserved = (
    ("enable_lora", bool, "LoRA adapters"),
    ("lora_paths", bool, "LoRA adapters"),
)


def require_served(server_args: ServerArgs, by: str, unserved: Unserved) -> None:
    """Raises ActivationError if the arguments use an option that ``by`` does not serve."""
    for field, is_meant, what in unserved:
        if is_meant(getattr(server_args, field)):
            raise hooks.ActivationError(
                f"{by} does not support {what} (--{field.replace('_', '-')}); remove one of the two"
            )
