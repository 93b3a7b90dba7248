"""Accesses of forwards to the KV pool, declared to the simulated device on the current stream.

What torch does "on a stream" the host does at once. Before it touches the pool, it therefore waits
for the stream, so that copies which the stream waits for have landed. The declared accesses let the
device's race checker compare forwards with copies.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from faked_cuda import journal
from faked_cuda.cudart import runtime
from faked_cuda.streams import current_stream, drain

READ, WRITE = 0, 2
_reading = threading.local()
_reported = 0


class Access(ctypes.Structure):
    """``fake_access`` of ``kernels/native/tests/fake_cuda/fake_cuda.h``."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("pitch", ctypes.c_size_t),
        ("write", ctypes.c_int),
    )


def _ranges(buffer: torch.Tensor, slots: Any, write: int) -> Iterator[Access]:
    """Yields the rows of slots, one access for each run of consecutive slots."""
    size = buffer.element_size()
    pitch, width = buffer.stride(0) * size, buffer[0].numel() * size
    starts = np.flatnonzero(np.diff(slots, prepend=slots[:1] - 2) != 1)
    for first, last in zip(starts, [*starts[1:], len(slots)], strict=True):
        address = buffer.data_ptr() + int(slots[first]) * pitch
        yield Access(address, width, int(last - first), pitch, write)


def _declare(pool: Any, layer: int, slots: Any, write: int) -> None:
    """Waits for the current stream, and declares that it accesses one layer of slots."""
    stream = current_stream().cuda_stream
    if len(slots):
        accesses = [
            each
            for buffer in (pool.k_buffer[layer], pool.v_buffer[layer])
            for each in _ranges(buffer, slots, write)
        ]
        array = (Access * len(accesses))(*accesses)
        runtime().kernel(stream, array)
    drain()
    _report()


def _report() -> None:
    global _reported
    for number in range(_reported, count := runtime().races()):
        journal.write("race", runtime().race(number))
    _reported = max(_reported, count)


def pool_imported(module: ModuleType) -> None:
    """Declares stores of new tokens, and waits for layers that an attention reads."""
    pool = module.MHATokenToKVPool
    store, keys = pool.set_kv_buffer, pool.get_key_buffer

    def set_kv_buffer(self: Any, layer: Any, info: Any, *args: Any, **kwargs: Any) -> Any:
        slots = info if isinstance(info, torch.Tensor) else module.unwrap_write_loc(info)[0]
        with torch._C.DisableTorchFunction():
            written = np.unique(slots.long().numpy())
            _declare(self, layer.layer_id - self.start_layer, written[written > 0], WRITE)
        return store(self, layer, info, *args, **kwargs)

    def get_key_buffer(self: Any, layer_id: int) -> Any:
        found = keys(self, layer_id)
        slots = getattr(_reading, "slots", None)
        if slots is not None:
            with torch._C.DisableTorchFunction():
                _declare(self, layer_id - self.start_layer, slots, READ)
        return found

    pool.set_kv_buffer, pool.get_key_buffer = set_kv_buffer, get_key_buffer


def triton_imported(module: ModuleType) -> None:
    """Notes the slots that an attention reads, while it runs."""
    backend = module.TritonAttnBackend

    def noting(original: Any) -> Any:
        def forward(
            self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with torch._C.DisableTorchFunction():
                rows, ends = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
                parts = [
                    self.req_to_token[row, :end].long().numpy()
                    for row, end in zip(rows, ends, strict=True)
                ]
                slots = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
            _reading.slots = slots[slots > 0]
            try:
                return original(self, q, k, v, layer, batch, *args, **kwargs)
            finally:
                _reading.slots = None

        return forward

    backend.forward_extend = noting(backend.forward_extend)
    backend.forward_decode = noting(backend.forward_decode)
