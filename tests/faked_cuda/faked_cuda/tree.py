"""SGLang's radix tree in Rust, which makes its tensors with torch's C++ library."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from faked_cuda.storage import mark


def adapter_imported(adapter: ModuleType) -> None:
    """Lets the tree make its tensors in host memory, and marks them as the device's."""
    bindings: Any = adapter.bindings
    parameters = bindings.TreeCoreInitParamsBinding
    bindings.TreeCoreInitParamsBinding = lambda **options: parameters(
        **{**options, "device": "cpu"}
    )
    core: Any = adapter.RustUnifiedTreeCore
    chosen = core._binding_class
    core._binding_class = lambda self: lambda *arguments: _Tree(chosen(self)(*arguments))


class _Tree:
    """A tree of Rust whose methods return tensors of the device."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tree, name)
        if not callable(value):
            return value

        def method(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                _mark(result)
            return result

        return method


def _mark(value: Any) -> None:
    """Marks the tensors in a result, except those of attributes that are named after the host."""
    if isinstance(value, torch.Tensor):
        mark(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _mark(item)
    elif isinstance(value, dict):
        for item in value.values():
            _mark(item)
    elif type(value).__name__.endswith("Binding"):
        for name in dir(value):
            if not name.startswith("_") and "host" not in name:
                _mark(getattr(value, name))
