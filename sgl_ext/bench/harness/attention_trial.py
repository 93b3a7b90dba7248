"""Attention layers on SGLang's real KV pool, without a model, for tests and benchmarks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_ext.engine.cpu.attention import CpuAttnBackend
from sgl_ext.engine.cpu.native_attention import batch_of
from sgl_ext.engine.kv.pool import SlabKVPool
from sgl_ext.memory.slab import HostSlab

Layout = Literal["layer-major", "block-major"]
"""Layout of the pool's memory: SGLang's own, or every layer's K and V of a slot side by side."""


@dataclass(frozen=True)
class Geometry:
    """Shape of one attention layer; the default is SmolLM2-135M's."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16


class Row(NamedTuple):
    """One row of a batch: ``new`` tokens behind ``prefix`` cached ones of request ``request``."""

    request: int
    prefix: int
    new: int


class AttentionTrial:
    """Requests with random K and V at shuffled slots, and the backends over them.

    K and V do not depend on the layout: trials that differ only in it hold the same values.

    Args:
        contexts: number of tokens of each request; all their K and V are in the pool.
        layers: number of attention layers, each with its own K and V.
        layout: layout of the pool's memory.
        run: number of successive tokens whose slots are successive.
        kernels: kernels of ``ours``, a value of SGLEXT_ATTENTION.
    """

    def __init__(
        self,
        geometry: Geometry,
        contexts: Sequence[int],
        *,
        layers: int = 1,
        layout: Layout = "layer-major",
        run: int = 1,
        kernels: str | None = None,
        seed: int = 0,
    ) -> None:
        self.geometry = geometry
        self._random = torch.Generator().manual_seed(seed)
        runs = sum(-(-context // run) for context in contexts)
        pool = _pool(geometry, runs * run, layers, layout)
        for layer in range(layers):
            for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                buffer.copy_(torch.randn(buffer.shape, generator=self._random))
        # Slot 0 is SGLang's padding slot.
        order = torch.randperm(runs, generator=self._random).to(torch.int32)
        slots = (order.unsqueeze(1) * run + torch.arange(run, dtype=torch.int32)).flatten() + 1
        table = torch.zeros(len(contexts), max(contexts), dtype=torch.int32)
        taken = 0
        for request, context in enumerate(contexts):
            table[request, :context] = slots[taken : taken + context]
            taken += -(-context // run) * run
        runner = SimpleNamespace(
            device="cpu",
            model=torch.nn.Module(),
            model_config=SimpleNamespace(),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=pool,
        )
        self.stock = TorchNativeAttnBackend(runner)
        self.ours = CpuAttnBackend(runner, kernels=kernels)
        self.gathering = CpuAttnBackend(runner, kernels="torch")
        window = geometry.window if geometry.window is not None else -1
        self.layers = [
            RadixAttention(
                geometry.heads,
                geometry.head_dim,
                geometry.head_dim**-0.5,
                geometry.kv_heads,
                layer,
                sliding_window_size=window,
            )
            for layer in range(layers)
        ]

    def query(self, rows: Sequence[Row]) -> torch.Tensor:
        """Returns random queries ``[sum(new), heads * head_dim]``."""
        size = (sum(row.new for row in rows), self.geometry.heads * self.geometry.head_dim)
        return torch.randn(size, generator=self._random).to(self.geometry.dtype)

    def extend(
        self, backend: TorchNativeAttnBackend, query: torch.Tensor, rows: Sequence[Row]
    ) -> torch.Tensor:
        """Runs one extend forward of ``rows``, several of which may name the same request."""
        return self.prepared(backend, rows)(query, 0)

    def decode(
        self, backend: TorchNativeAttnBackend, query: torch.Tensor, rows: Sequence[Row]
    ) -> torch.Tensor:
        """Runs one decode forward; every row has one new token."""
        return self.prepared(backend, rows, decode=True)(query, 0)

    def prepared(
        self, backend: TorchNativeAttnBackend, rows: Sequence[Row], *, decode: bool = False
    ) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Returns the attention of a forward as a function of query and layer.

        The metadata of the forward is prepared here.
        """
        batch = self._batch(ForwardMode.DECODE if decode else ForwardMode.EXTEND, rows)
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if decode else backend.forward_extend

        def attend(query: torch.Tensor, layer: int) -> torch.Tensor:
            found: torch.Tensor = forward(query, None, None, self.layers[layer], batch, False)
            return found

        return attend

    def reader(self, rows: Sequence[Row]) -> Callable[[int], int]:
        """Returns a function that only reads the K and V that ``rows`` attend to in a layer."""
        from sgl_ext._native import _attention

        table = self.ours.req_to_token_pool.req_to_token
        batch = batch_of(
            table,
            [row.request for row in rows],
            [row.prefix + row.new for row in rows],
            [row.new for row in rows],
        )
        pool, unit = self.ours.token_to_kv_pool, self.geometry.dtype.itemsize
        row_bytes = self.geometry.kv_heads * self.geometry.head_dim * unit

        def read(layer: int) -> int:
            keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
            return _attention.read_for_benchmark(
                batch, keys.data_ptr(), keys.stride(0) * unit, values.data_ptr(),
                values.stride(0) * unit, keys.shape[0], row_bytes, torch.get_num_threads(),
            )  # fmt: skip

        return read

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


def _pool(geometry: Geometry, slots: int, layers: int, layout: Layout) -> MHATokenToKVPool:
    """Returns SGLang's pool or the slab's, with a request for huge pages in either layout."""
    arguments = (slots, 1, geometry.dtype, geometry.kv_heads, geometry.head_dim, layers, "cpu")
    if layout == "block-major":
        slab_pool = SlabKVPool(*arguments, False, enable_alt_stream=False, fingerprint="trial")
        if isinstance(slab_pool.slab, HostSlab):
            slab_pool.slab.back_with_huge_pages(0, slab_pool.slab.blocks)
        return slab_pool
    pool = MHATokenToKVPool(*arguments, False, enable_alt_stream=False)
    shape = (layers, 2, *pool.k_buffer[0].shape)
    memory = mmap.mmap(
        -1, math.prod(shape) * geometry.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=geometry.dtype).view(shape)
    pool.k_buffer, pool.v_buffer = (list(part) for part in flat.unbind(1))
    return pool
