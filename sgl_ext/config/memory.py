"""The ``memory`` section: the KV pool on the device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_ext.config.values import Section


class Memory(Section):
    """Layout of KV on the device, and its allocation."""

    layout: Literal["auto", "block_major", "layer_major"] = "auto"
    """Layout of the pool. ``block_major``: one slab of blocks that hold all layers;
    ``layer_major``: SGLang's own pool; ``auto``: the slab wherever it serves."""
    first_group: Annotated[int, Field(ge=1, le=1 << 24, strict=True)] = 1000
    """Tokens for which a new request's first block group is sized (FastSwitch §3.1)."""
