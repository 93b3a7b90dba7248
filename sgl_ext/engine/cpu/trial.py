"""One attention layer on SGLang's real KV pool, without a model: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_ext.engine.cpu.attention import CpuAttnBackend


@dataclass(frozen=True)
class Geometry:
    """Shape of one attention layer; the default is SmolLM2-135M's."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16


class Row(NamedTuple):
    """``new`` tokens behind ``prefix`` cached ones of request ``request``."""

    request: int
    prefix: int
    new: int


class AttentionTrial:
    """Requests with random K and V at shuffled slots, and both backends over them.

    Args:
        contexts: tokens of each request; all their K and V are in the pool.
    """

    def __init__(self, geometry: Geometry, contexts: Sequence[int], *, seed: int = 0) -> None:
        self.geometry = geometry
        self._random = torch.Generator().manual_seed(seed)
        slots = sum(contexts)
        pool = MHATokenToKVPool(
            slots, 1, geometry.dtype, geometry.kv_heads, geometry.head_dim, 1, "cpu", False,
            enable_alt_stream=False,
        )  # fmt: skip
        for buffer in (pool.get_key_buffer(0), pool.get_value_buffer(0)):
            buffer.copy_(torch.randn(buffer.shape, generator=self._random))
        # Slot 0 is SGLang's padding slot.
        order = torch.randperm(slots, generator=self._random).to(torch.int32) + 1
        table = torch.zeros(len(contexts), max(contexts), dtype=torch.int32)
        for request, part in enumerate(order.split(list(contexts))):
            table[request, : len(part)] = part
        runner = SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=pool,
        )
        self.stock = TorchNativeAttnBackend(runner)
        self.ours = CpuAttnBackend(runner)
        self.layer = RadixAttention(
            geometry.heads, geometry.head_dim, geometry.head_dim**-0.5, geometry.kv_heads, 0,
            sliding_window_size=geometry.window if geometry.window is not None else -1,
        )  # fmt: skip

    def query(self, rows: Sequence[Row]) -> torch.Tensor:
        """Random queries ``[sum(new), heads * head_dim]``."""
        size = (sum(row.new for row in rows), self.geometry.heads * self.geometry.head_dim)
        return torch.randn(size, generator=self._random).to(self.geometry.dtype)

    def extend(
        self, backend: TorchNativeAttnBackend, query: torch.Tensor, rows: Sequence[Row]
    ) -> torch.Tensor:
        """One extend forward of ``rows``, several of which may name the same request."""
        batch = self._prepared(backend, ForwardMode.EXTEND, rows)
        return backend.forward_extend(query, None, None, self.layer, batch, False)

    def decode(
        self, backend: TorchNativeAttnBackend, query: torch.Tensor, rows: Sequence[Row]
    ) -> torch.Tensor:
        """One decode forward; every row has one new token."""
        batch = self._prepared(backend, ForwardMode.DECODE, rows)
        return backend.forward_decode(query, None, None, self.layer, batch, False)

    def _prepared(
        self, backend: TorchNativeAttnBackend, mode: ForwardMode, rows: Sequence[Row]
    ) -> SimpleNamespace:
        batch = self._batch(mode, rows)
        backend.init_forward_metadata(batch)
        return batch

    @staticmethod
    def _batch(mode: ForwardMode, rows: Sequence[Row]) -> SimpleNamespace:
        requests, prefixes, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
        return SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=requests,
            seq_lens=prefixes + lengths,
            extend_prefix_lens=prefixes,
            extend_seq_lens=lengths,
            encoder_lens=None,
            out_cache_loc=None,
        )
