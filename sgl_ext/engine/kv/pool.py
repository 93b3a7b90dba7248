"""SGLang's MHA pool, with strided views of one slab as its buffers."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_ext.memory.device_slab import PIECE, OwnDeviceSlab, SharedDeviceSlab
from sgl_ext.memory.lent import blocks_for
from sgl_ext.memory.mapping import PAGE
from sgl_ext.memory.slab import HostSlab, Layout, Slab


class SlabKVPool(MHATokenToKVPool):
    """KV pool whose ``k_buffer[l]`` and ``v_buffer[l]`` are views of the slab.

    A view has the shape ``[slots, kv_heads, head_dim]``. The two inner dimensions of a slot are
    contiguous; the stride between slots is a token of all layers. Code of SGLang that indexes slots
    works on the views. Code that takes a layer for one contiguous buffer is overridden here or
    refused at start (:func:`sgl_ext.engine.kv.obstacles.obstacle`).
    """

    slab: Slab

    def __init__(
        self,
        *args: object,
        fingerprint: str,
        borrows: int = 0,
        shared: bool = False,
        **kwargs: object,
    ) -> None:
        """Creates the pool from the arguments of SGLang's pool and further ones.

        Args:
            fingerprint: identifier of the model, as in :class:`~sgl_ext.memory.slab.Layout`.
            borrows: bytes of other processes' memory that get addresses.
            shared: whether other processes may map the memory, or theirs is mapped behind it.
        """
        self._fingerprint, self._borrows, self._shared = fingerprint, borrows, shared
        # SGLang's tiled copy of slots takes the stride between rows for the width of a row.
        super().__init__(*args, **{**kwargs, "enable_kv_cache_copy": False})
        self.use_native_move_kv_cache = True
        # SGLang's kernels that store KV trap on slots behind this size. Blocks that others lend
        # come later, behind the own ones; the allocator knows which of them are there.
        self.size = self.slab.blocks * self.page_size - self.page_size

    def _create_buffers_normal(self) -> None:
        layout = Layout(
            page=self.page_size,
            layers=self.layer_num,
            kv_heads=self.head_num,
            head_dim=self.head_dim,
            dtype=str(self.store_dtype).removeprefix("torch."),
            fingerprint=self._fingerprint,
        )
        rows = self.size + self.page_size  # padding tokens are written to the first block
        blocks = -(-rows // self.page_size)
        cuda = torch.device(self.device).type == "cuda"
        unit = PIECE if cuda else PAGE
        beyond = blocks_for(self._borrows, layout.block_bytes, unit) if self._borrows else 0
        if not cuda:
            self.slab = HostSlab.create(layout, blocks, beyond=beyond)
        elif self._shared:
            device = torch.cuda.current_device()
            self.slab = SharedDeviceSlab.create(layout, blocks, device, beyond=beyond)
        else:
            self.slab = OwnDeviceSlab.create(layout, blocks, torch.cuda.current_device())
        tokens = self.slab.tensor().flatten(0, 1)
        self.k_buffer = [tokens[:, layer, 0] for layer in range(self.layer_num)]
        self.v_buffer = [tokens[:, layer, 1] for layer in range(self.layer_num)]

    def _build_kv_buffer_descs(self) -> list[object]:
        return []  # only refused options use descriptors of contiguous layers

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return self.slab.size // 2, self.slab.size // 2

    def get_contiguous_buf_infos(self) -> object:
        raise NotImplementedError("a layer of the block-major slab is not a contiguous buffer")

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        del self.slab
