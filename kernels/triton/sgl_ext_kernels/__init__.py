"""Triton kernels over the KV slab ``[blocks, page, layers, 2, kv_heads, head_dim]``.

The slab is block-major: everything of a block is contiguous, and a token's rows of one layer, K and
V side by side, lie at a fixed stride. The operations here copy parts of it to and from one packed
*staging* tensor, for links on which one large transfer beats many small ones (FastSwitch §3.1).
They move bytes and serve every dtype.

==================  ==========================  ==================================================
gather / scatter    addressed by                staging, in the slab's dtype
==================  ==========================  ==================================================
``…_groups``        runs of blocks              ``[blocks, page, layers, 2, kv_heads, head_dim]``
``…_layer``         blocks and one layer        ``[blocks, page, 2, kv_heads, head_dim]``
``…_tokens``        slots (block * page + i)    ``[tokens, layers, 2, kv_heads, head_dim]``
==================  ==========================  ==================================================

``reference`` has the same operations in plain torch. This package needs torch and Triton alone.
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
