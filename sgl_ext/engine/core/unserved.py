"""Options of SGLang that powers over its radix cache do not serve."""

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
    ("pp_size", lambda size: size > 1, "pipeline parallelism"),
    ("attn_cp_size", lambda size: size > 1, "context parallelism"),
)


def require_served(server_args: ServerArgs, power: str, unserved: Unserved) -> None:
    """Raises ActivationError if the arguments use an option of :data:`COMMON` or ``unserved``."""
    for field, is_meant, what in (*COMMON, *unserved):
        if is_meant(getattr(server_args, field)):
            raise hooks.ActivationError(
                f"{power} does not support {what} (--{field.replace('_', '-')}); remove one of "
                "the two"
            )
