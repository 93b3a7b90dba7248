"""Linear layers of float32 over weights in the order in which oneDNN's kernels read them.

torch passes a product of a few rows to a library that, depending on the processor, reads weights at
a fraction of the memory bandwidth; a decode step consists of such products. A packed weight is a
second copy. Only the first ``LIMIT`` bytes of a model are packed, regardless of the machine's free
memory, so that servers that are compared compute alike. When weights change, the copies are dropped
and torch's product serves.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from sgl_ext.engine.core import hooks, weight_updates
from sgl_ext.engine.core.hooks import Original

LIMIT = 2 << 30
"""Maximum number of bytes of a model's weights that are packed, in the order of their loading."""
_ROWS = 64
"""Number of rows for which weights are packed; the packed weights serve any number."""
_HEADS = (ParallelLMHead, VocabParallelEmbedding)

logger = logging.getLogger(__name__)

_packed: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()
_left = LIMIT


def _pack(layer: torch.nn.Module) -> None:
    global _left
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    size = weight.numel() * weight.element_size()
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or size > _left:
        return
    _left -= size
    _packed[layer] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _loaded(_result: None, _method: object, layer: torch.nn.Module) -> None:
    _packed.pop(layer, None)
    _pack(layer)


def _apply(
    original: Original,
    method: object,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Any:
    weight = _packed.get(layer)
    if weight is None or x.dtype != torch.float32:
        return original(method, layer, x, bias)
    return _product(x, weight, bias)


def _head(
    original: Original,
    processor: Any,
    hidden: torch.Tensor,
    lm_head: torch.nn.Module,
    *args: object,
    **kw: object,
) -> object:
    """Computes the product of a head, which is packed when it is first used.

    A head may be the embedding too, which is known only where it is used.
    """
    if hidden.dtype == torch.float32 and type(lm_head) in _HEADS:
        if lm_head not in _packed:
            _pack(lm_head)
        if (weight := _packed.get(lm_head)) is not None and not processor.rl_on_policy_target:
            return _product(hidden, weight, None)
    return original(processor, hidden, lm_head, *args, **kw)


def _drop() -> None:
    """Drops all packed weights, and packs none from now on."""
    global _left
    if _packed:
        logger.info("the model's weights change; packed weights are not used from now on")
    _packed.clear()
    _left = 0


_METHOD = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"
_WHY = "SGLang packs weights only for its compiled CPU engine"
HOOKS = (
    hooks.Hook(f"{_METHOD}.apply", "around", _apply, _WHY),
    hooks.Hook(f"{_METHOD}.process_weights_after_loading", "after", _loaded, _WHY),
    hooks.Hook(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "around",
        _head,
        _WHY,
    ),
)


def install() -> None:
    """Packs the weights of models that are loaded from now on, if torch has oneDNN."""
    if torch.backends.mkldnn.is_available():
        weight_updates.listeners.add(_drop)
        hooks.apply([*HOOKS, *weight_updates.HOOKS])
