"""Functions that run directly after the first import of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_AFTER = {
    "torch": ("faked_cuda.install", "torch_imported"),
    "sglang.srt.mem_cache.rust_tree_core.adapter": ("faked_cuda.tree", "adapter_imported"),
    "sglang.srt.mem_cache.memory_pool": ("faked_cuda.accesses", "pool_imported"),
    "sglang.srt.layers.attention.triton_backend": ("faked_cuda.accesses", "triton_imported"),
    "triton.backends.nvidia.driver": ("faked_cuda.kernels", "driver_imported"),
    "triton.runtime.interpreter": ("faked_cuda.kernels", "interpreter_imported"),
    "sglang.kernels.jit.utils": ("faked_cuda.kernels", "jit_imported"),
    "sglang.kernels.ops.attention.rope": ("faked_cuda.kernels", "rope_imported"),
    "sglang.kernels.ops.kvcache.kvcache": ("faked_cuda.kernels", "store_imported"),
}
"""Module → module and function that get it"""


class _Finder:
    """Finder that lets another one find a module, and wraps its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _AFTER:
            return None
        module, function = _AFTER.pop(name)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(loaded: ModuleType) -> None:
            execute(loaded)
            after: Callable[[ModuleType], None] = getattr(import_module(module), function)
            after(loaded)

        loader.exec_module = exec_module
        return spec


def install() -> None:
    """Puts the finder in front of the others."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
