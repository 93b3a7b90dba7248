"""The ``memory`` section: the KV pool on the device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_ext.config.values import Section


class Memory(Section):
    """Where KV lies on the device, and how it is handed out."""

    layout: Literal["auto", "block_major", "layer_major"] = "auto"
    """``block_major``: one slab of blocks that hold all layers; ``layer_major``: SGLang's own;
    ``auto``: the slab wherever it serves."""
    first_group: Annotated[int, Field(ge=1, le=1 << 24, strict=True)] = 1000
    """Tokens that a new request's first block group is made for (FastSwitch §3.1)."""
