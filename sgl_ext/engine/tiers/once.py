"""KV that is not worth a place in tiers, because no later request looks it up."""

from __future__ import annotations

from sgl_ext.engine.core.requests import ONCE
from sgl_ext.engine.core.sglang_types import Node, TreeCore


def used_once(tree: TreeCore, node: Node) -> bool:
    """Returns whether the KV of a node is under the key of a request for one use."""
    key, _salt = tree.prefetch_anchor_info(node)
    return (key or "").startswith(ONCE)
