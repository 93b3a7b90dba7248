"""SGLang's ``torch_native`` attention backend, computed by native kernels in place over the pool.

Layers that the native kernels do not serve are gathered and computed by :mod:`.sdpa`. SGLang
selects backends by name, and selects Triton helpers for every name that it does not know. The
registry entry ``torch_native`` is therefore replaced; this registry is SGLang's extension point for
backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.activation import refuse
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import ForwardBatch, ModelRunner, RadixAttention
from sgl_ext.engine.cpu.native_attention import batch_of, native_attention
from sgl_ext.engine.cpu.sdpa import CausalBand, attend
from sgl_ext.engine.cpu.unserved_attention import unserved

if TYPE_CHECKING:
    from sgl_ext._native import _attention
    from sgl_ext.engine.clusters.forward import StoredForward
    from sgl_ext.engine.clusters.recorder import Recorder
    from sgl_ext.engine.peer.stream import LayerStream

STOCK_ATTENTION = "SGLEXT_STOCK_ATTENTION"
"""Environment variable; 1 keeps SGLang's own ``torch_native`` (the benchmark's comparison)."""


class Row(NamedTuple):
    """One row of a forward batch: ``new`` query tokens from ``start`` on over ``slots``."""

    start: int
    new: int
    slots: torch.Tensor
    """KV slots in sequence order, including those of the new tokens, ``[context]``."""


class ForwardRows:
    """Rows of one forward in the form of each kernel, made when a layer first needs it.

    Args:
        table: KV slots, int32 ``[requests, width]``.
        requests: line of ``table`` of each row.
        contexts: number of tokens of each row's sequence, including the new ones.
        lengths: number of new tokens of each row.
        wholes: new tokens and context of the request that each row is a part of; if empty, each row
            is a whole request.
    """

    def __init__(
        self,
        table: torch.Tensor,
        requests: list[int],
        contexts: list[int],
        lengths: list[int],
        wholes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.table, self.requests = table, requests
        self.contexts, self.lengths = contexts, lengths
        self._wholes = wholes

    @cached_property
    def native(self) -> _attention.Batch:
        return batch_of(self.table, self.requests, self.contexts, self.lengths, self._wholes)

    @cached_property
    def rows(self) -> list[Row]:
        rows, start = [], 0
        for request, context, new in zip(self.requests, self.contexts, self.lengths, strict=True):
            rows.append(Row(start, new, self.table[request, :context]))
            start += new
        return rows

    def chosen(self, rows: Sequence[int]) -> ForwardRows:
        """Returns some of the rows."""
        return ForwardRows(
            self.table,
            [self.requests[row] for row in rows],
            [self.contexts[row] for row in rows],
            [self.lengths[row] for row in rows],
            [self._wholes[row] for row in rows] if self._wholes else (),
        )

    def translated(self, translate: Callable[[torch.Tensor], torch.Tensor]) -> ForwardRows:
        """Returns the rows over another pool; ``translate`` maps this pool's slots to its own."""
        table = self.table[self.requests, : max(self.contexts, default=0)]
        # A token that has left the window has no slot there; its key is masked or cut off.
        homes = translate(table.long()).clamp_(min=0).to(torch.int32)
        requests = list(range(len(self.requests)))
        return ForwardRows(homes, requests, self.contexts, self.lengths, self._wholes)


class CpuAttnBackend(TorchNativeAttnBackend):
    """Attention backend for any rows, several of which may alias one request.

    SGLang's batch defines a row: the slots of its request up to ``seq_len``, of which the last
    ``extend_len`` are new. K and V of the batch's tokens are in the pool before any row attends, so
    that rows of one request see each other as in a sequential run.

    Args:
        kernels: value of SGLEXT_ATTENTION; None takes the environment's.
    """

    def __init__(self, model_runner: ModelRunner, *, kernels: str | None = None) -> None:
        super().__init__(model_runner)
        if why := unserved(model_runner):
            refuse(
                ActivationError(
                    f"the CPU attention does not support {why}, which this model needs; serve it "
                    "on a GPU"
                )
            )
        self._native = native_attention(kernels)
        self._band = CausalBand()
        self._rows = self._swa_rows = ForwardRows(torch.empty(0, 0, dtype=torch.int32), [], [], [])
        self._stored: StoredForward | None = None
        self._recorder: Recorder | None = None
        self._stream: LayerStream | None = None
        self._plain_rows = self._rows  # rows that follow no stored context, if others do

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._rows = self._rows_of(forward_batch)
        self._stored = None
        if (ext := runtime.current) is not None:
            self._attach(ext)
        if self.use_sliding_window_kv_pool:
            self._swa_rows = self._rows.translated(
                self.token_to_kv_pool.translate_loc_from_full_to_swa
            )

    def _attach(self, ext: ExtRuntime) -> None:
        """Attaches the powers that read or write K, V and queries of the rows of this forward."""
        if ext.clusters is not None:
            self._recorder = ext.clusters.recorder
            self._stored = ext.clusters.following
            if self._stored is not None:
                self._plain_rows = self._rows.chosen(self._stored.plain)
        if ext.peer is not None:
            self._stream = ext.peer.stream

    def _rows_of(self, forward_batch: ForwardBatch) -> ForwardRows:
        contexts = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            lengths = [1] * len(contexts)
        elif forward_batch.extend_seq_lens is not None:
            lengths = forward_batch.extend_seq_lens.tolist()
        else:
            raise NotImplementedError(
                f"the CPU attention does not support {forward_batch.forward_mode.name} batches; "
                "start without the option that needs them (for example speculative decoding)"
            )
        requests = forward_batch.req_pool_indices.tolist()
        split = runtime.current and runtime.current.split
        table, wholes = self.req_to_token_pool.req_to_token, split.wholes if split else ()
        return ForwardRows(table, requests, contexts, lengths, wholes)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if (
            layer.is_cross_attention
            or layer.attn_type == AttentionType.ENCODER_ONLY
            or forward_batch.encoder_lens is not None
        ):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if layer.is_cross_attention or forward_batch.encoder_lens is not None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def is_native(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> bool:
        """Returns whether the compiled kernels attend to such tensors. Otherwise torch does."""
        native = self._native
        return native is not None and native.serves(query, keys, values, scale)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        native = self._native
        if not self.is_native(query, keys, values, layer.scaling):
            native = None
        stream = self._stream
        if native is None or (stream is not None and not stream.active):
            stream = None
        number = layer.layer_id - self.token_to_kv_pool.start_layer
        if save_kv_cache and k is not None and v is not None:
            where = forward_batch.out_cache_loc
            if stream is not None:
                where, k, v = stream.save(number, where, k, v)
            written = KVWriteLoc(where, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, written, k, v)
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        in_swa_pool = (
            self.use_sliding_window_kv_pool
            and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        )
        rows = self._swa_rows if in_swa_pool else self._rows
        if self._recorder is not None:
            self._recorder.take(number, query)

        if self._stored is not None:
            out = self._with_stored(self._stored, number, query, keys, values, layer.scaling)
        elif native is not None:
            out = native.attend(
                rows.native, query, keys, values, scale=layer.scaling, window=window,
                elsewhere=None if stream is None else stream.layer(number),
            )  # fmt: skip
            if stream is not None:
                stream.done(number)
        else:
            out = self._gathered(rows.rows, query, keys, values, layer.scaling, window)
        return out.view(query.shape[0], -1)

    def _with_stored(
        self,
        stored: StoredForward,
        number: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Returns the attention of a batch in which some rows follow stored contexts.

        The power's start has checked that the native kernels serve the model.
        """
        assert self._native is not None  # noqa: S101
        out = torch.empty_like(query)
        if len(stored.plain):
            asked = query[stored.plain_tokens]
            out[stored.plain_tokens] = self._native.attend(
                self._plain_rows.native, asked, keys, values, scale=scale
            )
        out[stored.followed] = stored.attend(
            self._native, number, query[stored.followed], keys, values
        )
        return out

    def _gathered(
        self,
        rows: list[Row],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Returns the attention that torch computes over a copy of each row's context."""
        out = query.new_empty(*query.shape[:2], values.shape[2])
        for start, new, slots in rows:
            # index_select is five times faster than indexing with a tensor here.
            out[start : start + new] = attend(
                query[start : start + new],
                keys.index_select(0, slots).to(query.dtype),
                values.index_select(0, slots).to(query.dtype),
                self._band,
                scale=scale,
                window=window,
            )
        return out


def install() -> None:
    """Registers the backend under the name ``torch_native``."""
    if os.environ.get(STOCK_ATTENTION) != "1":
        attention_registry.ATTENTION_BACKENDS["torch_native"] = CpuAttnBackend
