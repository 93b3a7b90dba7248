"""The ``restore`` section: prefixes that are computed and loaded at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_ext.config.values import Section


class Restore(Section):
    """Computes the front of a cached prefix while its back loads (exact; CacheFlow)."""

    policy: Literal["shortest", "longest", "cake"] = "shortest"
    """Who goes first among requests that are restored: the least remaining time, by computing and
    by loading; the largest recomputation, by loading (CacheFlow); the first come (Cake)."""
    chunk: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] = 512
    """Tokens that are computed at a time while others load."""
    ageing: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 0.5
    """Seconds of remaining time that a second of waiting is worth, to ``shortest``."""
    host: Literal["auto", "tokens", "layers", "never"] = "auto"
    """What is computed of what host memory has, while the rest of it loads: the first tokens, the
    lower layers, what is faster for its length if anything is, or nothing."""
