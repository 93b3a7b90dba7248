"""Functions that need values of the device on the host, or that tell where a tensor is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from faked_cuda import journal
from faked_cuda.mode import SPECIAL, ordinary, refuse
from faked_cuda.storage import CPU, CUDA, is_device

T = torch.Tensor
_READS = (
    T.__bool__, T.__complex__, T.__contains__, T.__float__, T.__format__, T.__index__, T.__int__,
    T.__repr__, T.allclose, T.argwhere, T.bincount, T.equal, T.is_nonzero, T.item, T.masked_select,
    T.nonzero, T.tolist, T.unique, T.unique_consecutive, torch.allclose, torch.argwhere,
    torch.bincount, torch.equal, torch.is_nonzero, torch.masked_select, torch.nonzero, torch.unique,
    torch.unique_consecutive,
)  # fmt: skip


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(value, torch.Tensor) and is_device(value) for value in args):
        journal.write("read", _name(func))
    return ordinary(func, args, kwargs)


def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_device(args[0]):
        refuse(
            TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first. (faked)"
            )
        )
    return func(*args, **kwargs)


def _where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) + len(kwargs) == 1 and args and is_device(args[0]):
        journal.write("read", "where of a condition alone")
    return ordinary(func, args, kwargs)


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = kwargs.get("output_size") is not None
    if not known and any(isinstance(a, torch.Tensor) and is_device(a) for a in args[-1:]):
        journal.write("read", "repeat_interleave without output_size")
    return ordinary(func, args, kwargs)


def _boolean(part: object) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def _indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Body of ``tensor[index]`` and ``tensor[index] = value``."""
    tensor, index, *value = args
    on_device = is_device(tensor)
    name = _name(func)
    # A mask that selects where one value is written needs no count of its elements.
    filled = bool(value) and not (isinstance(value[0], torch.Tensor) and value[0].dim())
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            ends = (part.start, part.stop, part.step)
            if any(isinstance(end, torch.Tensor) and is_device(end) for end in ends):
                journal.write("read", f"{name} with a slice of the device")
        elif isinstance(part, torch.Tensor):
            _index_by_tensor(on_device, part, name, filled)
        elif on_device and isinstance(part, (list, np.ndarray)):
            journal.write("upload", f"{name} with an index of the host")
    if value:
        _value(on_device, value[0], name)
    return ordinary(func, args, kwargs)


def _index_by_tensor(on_device: bool, part: torch.Tensor, name: str, filled: bool) -> None:
    if is_device(part) and not on_device:
        if part.dim():
            refuse(
                RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor "
                    "(cpu) (faked)"
                )
            )
        journal.write("read", f"{name} with an index of the device")
    elif is_device(part) and _boolean(part) and not filled:
        journal.write("read", f"{name} with a mask")
    elif is_device(part) and not part.dim() and not _boolean(part):
        journal.write("read", f"{name} with a scalar of the device")
    elif on_device and part.dim() and not is_device(part):
        journal.write("upload", f"{name} with an index of the host")


def _value(on_device: bool, value: object, name: str) -> None:
    if isinstance(value, torch.Tensor):
        if on_device and value.dim() and not is_device(value):
            journal.write("upload", f"{name} of a value of the host")
        elif not on_device and is_device(value):
            journal.write("read", f"{name} of a value of the device")
    elif on_device and isinstance(value, (list, tuple, np.ndarray)):
        journal.write("upload", f"{name} of a value of the host")


def _device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return CUDA if is_device(args[0]) else func(*args, **kwargs)


def _share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if is_device(args[0]) else func(*args, **kwargs)


SPECIAL.update(dict.fromkeys(_READS, _read))
SPECIAL.update(
    {
        T.numpy: _numpy,
        T.__array__: _numpy,
        T.__getitem__: _indexed,
        T.__setitem__: _indexed,
        torch.where: _where,
        torch.repeat_interleave: _repeat,
        T.repeat_interleave: _repeat,
        T.share_memory_: _share,
        T.device.__get__: _device,
        T.is_cuda.__get__: lambda _func, args, _kwargs: is_device(args[0]),
        T.is_cpu.__get__: lambda func, args, _kwargs: not is_device(args[0]) and func(*args),
        T.get_device: lambda func, args, _kwargs: 0 if is_device(args[0]) else func(*args),
    }
)

__all__ = ["CPU"]
