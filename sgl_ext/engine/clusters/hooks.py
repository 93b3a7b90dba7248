"""Hooks of the ``clusters`` power on attention, and on the KV and tokens of requests."""

from __future__ import annotations

import torch

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.meta_info import tell
from sgl_ext.engine.core.sglang_types import RadixAttention, RadixTree, Req


def _checkpointed(
    original: Original, tree: RadixTree, req: Req, *args: object, **kw: object
) -> object:
    """Records the KV of a request that has ended, before the request loses its slots.

    The tree gets KV only if later requests of the context read it from the pool, and only when the
    request has ended: a preempted one would find it, and not compute the queries again.
    """
    ext = runtime.current
    if ext is None or (power := ext.clusters) is None or not power.recorder.any:
        return original(tree, req, *args, **kw)
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    passing = power.recorder.passing(req.rid, ended=req.finished())
    if req.finished() and not isinstance(req.finished_reason, FINISH_ABORT):
        prompt = req.origin_input_ids
        slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(prompt)].long()
        if power.recorder.ended(req.rid, prompt, slots):
            tell(req, {"power": power.name, "recorded": True})
    return None if passing else original(tree, req, *args, **kw)


def _attended(
    original: Original,
    layer: RadixAttention,
    q: torch.Tensor,
    *args: object,
    **kw: object,
) -> object:
    """Adds the attention of followers to their contexts on a device."""
    out = original(layer, q, *args, **kw)
    ext = runtime.current
    if ext is not None and (power := ext.clusters) is not None and power.device is not None:
        power.device.attended(layer.layer_id, q, out)
    return out


def _on_finish(req: Req, new_accepted_len: int = 1) -> None:
    """Removes the token of a forward that failed for the request."""
    ext = runtime.current
    if ext is None or (power := ext.clusters) is None:
        return
    if power.device is not None:
        power.device.end()  # every forward that was launched has called all layers
    if power.stored.lost(req.rid) and new_accepted_len and req.output_ids:
        req.output_ids.pop()


_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
HOOKS = (
    hooks.Hook(
        "sglang.srt.layers.radix_attention.RadixAttention.forward",
        "around",
        _attended,
        "SGLang's attention backends on CUDA read no KV outside of the pool, and each of them "
        "returns its output here",
    ),
    hooks.Hook(
        f"{_TREE}.checkpoint",
        "around",
        _checkpointed,
        "the KV of a request that ends is owned by its radix tree only",
    ),
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "before",
        _on_finish,
        "SGLang treats the result of every forward as a token",
    ),
)
