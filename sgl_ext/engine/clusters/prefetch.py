"""Pipelined prefetching: reads the next layer's blocks while a layer computes (Swarm §7).

The input of a layer goes through the next layer's norm, projection and rotation. The predicted
queries differ little from the actual ones, because a layer adds little to its input.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.core.sglang_types import KVPool
from sgl_ext.errors import ExtError

_ARGUMENTS = ("positions", "hidden_states", "forward_batch")
"""Names of the first arguments of a decoder layer's forward."""
_ROWS = 32
"""Maximum number of rows for prefetching; with more, a layer computes longer than it waits."""


class Prefetch:
    """Prefetching for one model, by hooks on its layers.

    Args:
        model: SGLang's model.
        pool: SGLang's KV pool.
        stored: registry of the contexts.
        times: number of blocks to read ahead, as a multiple of those that a query is given.

    Raises:
        ExtError: the model's layers are of an unknown kind.
    """

    def __init__(
        self, model: nn.Module, pool: KVPool, stored: StoredContexts, times: float
    ) -> None:
        self._pool, self._stored, self._times = pool, stored, times
        self._layers = _layers_of(model)
        for at, layer in enumerate(self._layers[:-1]):
            layer.register_forward_pre_hook(partial(self._ahead, at + 1))

    def _ahead(self, number: int, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Prefetches for layer ``number`` by predicted queries, before the previous layer runs."""
        running = self._stored.running
        if running is None or len(inputs) < len(_ARGUMENTS):
            return
        positions, hidden, batch = inputs[: len(_ARGUMENTS)]
        rows = running.followed  # on the device of the forward
        if len(rows) > _ROWS or batch.residual_stream is None:
            return
        given = batch.residual_stream.snapshot(hidden)[rows]
        query = _query(self._layers[number], positions[rows], given)
        keys = self._pool.get_key_buffer(self._pool.start_layer + number)
        running.prefetch(number, query, keys, self._times)


def _layers_of(model: nn.Module) -> Sequence[nn.Module]:
    layers = getattr(getattr(model, "model", None), "layers", ())
    for layer in layers:
        names = (*inspect.signature(layer.forward).parameters,)
        attention = getattr(layer, "self_attn", None)
        known = hasattr(attention, "qkv_proj") and hasattr(attention, "rotary_emb")
        normed = hasattr(attention, "q_norm") and not hasattr(attention, "forward_prepare_native")
        if names[: len(_ARGUMENTS)] != _ARGUMENTS or not known or normed:
            break
    else:
        if layers:
            return tuple(layers)
    raise ExtError(
        f"clusters.prefetch does not support the layers of {type(model).__name__}; set it to 0"
    )


def _query(layer: Any, positions: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Returns the queries that a layer would compute from an input, ``[rows, heads, head_dim]``."""
    attention, normed = layer.self_attn, layer.input_layernorm(given)
    if hasattr(attention, "forward_prepare_native"):
        query, _, _ = attention.forward_prepare_native(positions, normed)
    else:
        qkv, _ = attention.qkv_proj(normed)
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        query, keys, _ = qkv.split(sizes, dim=-1)
        query, _ = attention.rotary_emb(positions, query, keys)
    return query.reshape(len(given), -1, attention.head_dim)
