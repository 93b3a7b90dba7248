"""Kernels of SGLang that need nvcc or a driver, in forms that run on the host."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

import torch

from faked_cuda.streams import drain


def interpreter_imported(interpreter: ModuleType) -> None:
    """Lets Triton's interpreter see faked tensors as what they are, tensors of the host."""
    original = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        drain()
        with torch._C.DisableTorchFunction():
            return original(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


def driver_imported(driver: ModuleType) -> None:
    """Keeps Triton from compiling its interface to a driver, which the interpreter does not use."""
    driver.CudaDriver.is_active = staticmethod(lambda: False)  # type: ignore[attr-defined]


def jit_imported(utils: ModuleType) -> None:
    """Refuses to compile CUDA sources; SGLang has other forms for most kernels."""

    def load_jit(*args: str, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"the kernel {'/'.join(args)} needs nvcc, and CUDA is faked")

    utils.load_jit = load_jit


def rope_imported(rope: ModuleType) -> None:
    """Replaces the rotation of queries and keys in place."""

    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        positions: torch.Tensor,
        *,
        is_neox: bool,
        fused_args: Any = None,
        **_kwargs: object,
    ) -> None:
        if fused_args is not None:
            raise NotImplementedError("rotation and storing of keys at once is not faked")
        cos, sin = cos_sin_cache.index_select(0, positions.long()).unsqueeze(1).chunk(2, -1)
        for tensor in (q, k):
            x = tensor.float()
            a, b = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
            rotated = (a * cos - b * sin, b * cos + a * sin)
            tensor.copy_(
                torch.cat(rotated, -1) if is_neox else torch.stack(rotated, -1).flatten(-2)
            )

    rope.apply_rope_with_cos_sin_cache_inplace = apply


def store_imported(kvcache: ModuleType) -> None:
    """Replaces the kernel that stores keys and values; like it, it skips slot 0."""

    def store(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        indices: torch.Tensor,
        *,
        size_limit: int = 0,
        **_options: object,
    ) -> None:
        drain()
        with torch._C.DisableTorchFunction():
            if ((indices < 0) | (indices >= (size_limit or len(k_cache)))).any():
                raise RuntimeError(
                    f"store_cache got a slot outside of [0, {size_limit}): {indices}"
                )
            kept = indices != 0
            k_cache[indices[kept]] = k[kept]
            v_cache[indices[kept]] = v[kept]

    kvcache.can_use_store_cache = lambda *_args, **_kwargs: True
    kvcache.store_cache = store
