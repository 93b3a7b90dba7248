"""Marks of storages: memory of the faked device, and pinned host memory.

A mark is an attribute of the storage's Python object, which torch keeps as long as the storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
_PLAIN = {torch.strided}


def storage_of(tensor: torch.Tensor) -> Any:
    """Returns the storage of a tensor; None if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def is_device(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in the faked device's memory. Call it outside of the mode."""
    return getattr(storage_of(tensor), "faked_cuda", False)


def is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(storage_of(tensor), "faked_pinned", False)


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Declares the memory of a tensor as the device's."""
    if (storage := storage_of(tensor)) is not None:
        storage.faked_cuda = True
    return tensor


def pin(tensor: torch.Tensor) -> torch.Tensor:
    if (storage := storage_of(tensor)) is not None:
        storage.faked_pinned = True
    return tensor


def tensors_in(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yields the tensors in arguments or results, also in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)


def as_device(value: object) -> torch.device | None:
    """Returns the device that an argument names; None if it names none."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu", "meta"):
        return torch.device(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    return None
