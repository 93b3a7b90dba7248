"""Triton kernels over the KV slab ``[blocks, page, layers, 2, kv_heads, head_dim]``.

The slab is block-major: the KV of a block is contiguous, and the K and V rows of one layer are
adjacent, at a fixed stride from token to token. The operations copy parts of the slab to and from
one packed *staging* tensor, for links on which one large transfer is faster than many small ones
(FastSwitch §3.1). They copy bytes and therefore support every dtype.

==================  ==========================  ==================================================
gather / scatter    addressed by                staging, in the slab's dtype
==================  ==========================  ==================================================
``…_groups``        runs of blocks              ``[blocks, page, layers, 2, kv_heads, head_dim]``
``…_layer``         blocks and one layer        ``[blocks, page, 2, kv_heads, head_dim]``
``…_tokens``        slots (block * page + i)    ``[tokens, layers, 2, kv_heads, head_dim]``
==================  ==========================  ==================================================

``reference`` has the same operations in plain torch. This package depends only on torch and Triton.
"""

from __future__ import annotations

from . import reference
from .rows import Rows, Runs, check_blocks, check_runs, check_slots
from .slab import (
    gather_groups,
    gather_layer,
    gather_tokens,
    scatter_groups,
    scatter_layer,
    scatter_tokens,
)

__all__ = [
    "Rows",
    "Runs",
    "check_blocks",
    "check_runs",
    "check_slots",
    "gather_groups",
    "gather_layer",
    "gather_tokens",
    "reference",
    "scatter_groups",
    "scatter_layer",
    "scatter_tokens",
]
