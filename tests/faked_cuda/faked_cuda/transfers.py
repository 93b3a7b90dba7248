"""Copies between host and device: ``to``, ``cuda``, ``cpu``, ``copy_``, ``tensor`` and others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils import _device

from faked_cuda import journal
from faked_cuda.mode import SPECIAL, ordinary
from faked_cuda.storage import CPU, CUDA, as_device, is_device, is_pinned, mark, pin
from faked_cuda.streams import drain


def _moved(
    tensor: torch.Tensor,
    target: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Returns what ``tensor.to(...)`` returns, in memory of the target."""
    source = is_device(tensor)
    dtype = tensor.dtype if dtype is None else dtype
    if target.type == "meta" or tensor.is_meta:
        return tensor.to(target if target.type == "meta" else CPU, dtype, copy=copy)
    onto = target.type == "cuda"
    # A copy must not share memory with its source, which either side may change.
    crossing = source != onto
    if source or onto:
        drain()
    result = tensor.to(dtype, copy=copy or crossing, memory_format=memory_format)
    if onto and result is not tensor:
        mark(result)
    if crossing and onto:
        _upload(non_blocking, "to(cuda)")
    elif crossing:
        # torch puts the result of a non-blocking copy into pinned memory.
        pin(result) if non_blocking else journal.write("read", "to(cpu)")
    return result


def _upload(non_blocking: bool, what: str) -> None:
    if not non_blocking:
        journal.write("upload", what)


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    target, dtype = as_device(kwargs.pop("device", None)), kwargs.pop("dtype", None)
    other = kwargs.pop("other", None)
    flags = []
    for value in rest:
        if isinstance(value, torch.Tensor):
            other = value
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif value is not None:
            target = as_device(value)
    if other is not None:
        target, dtype = CUDA if is_device(other) else other.device, other.dtype
    if target is None:
        target = CUDA if is_device(tensor) else tensor.device
    for name, value in zip(("non_blocking", "copy"), flags, strict=False):
        kwargs[name] = value
    if kwargs.get("memory_format", ...) is None:
        del kwargs["memory_format"]
    return _moved(tensor, target, dtype, **kwargs)


def _cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    flag = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    return _moved(args[0], CUDA, non_blocking=flag)


def _cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _moved(args[0], CPU)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    into, source = args[0], kwargs.get("src", args[1] if len(args) > 1 else None)
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if is_device(into) or is_device(source):
        drain()
    if is_device(into) and not is_device(source):
        _upload(non_blocking, "copy_ from the host")
    elif is_device(source) and not is_device(into):
        if not non_blocking:
            journal.write("read", "copy_ to the host")
        elif not is_pinned(into):
            journal.write("read", "copy_ to pageable memory, which blocks")
    return func(*args, **kwargs)


def _from_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Body of ``torch.tensor``, ``as_tensor`` and ``asarray``."""
    data = args[0] if args else kwargs["data"]
    target = as_device(kwargs.get("device"))
    if isinstance(data, torch.Tensor):
        copies = func is torch.tensor or kwargs.get("copy", False)
        target = (CUDA if is_device(data) else data.device) if target is None else target
        return _moved(data, target, kwargs.get("dtype"), copy=bool(copies))
    if hasattr(data, "__cuda_array_interface__"):
        return _over(data)
    target = target or _device.CURRENT_DEVICE
    if isinstance(data, (list, tuple)) and any(
        isinstance(item, torch.Tensor) and is_device(item) for item in data
    ):
        journal.write("read", f"{func.__name__} of device tensors")
    if target is None or target.type != "cuda":
        return ordinary(func, args, kwargs)
    kwargs["device"] = "cpu"
    kwargs.pop("copy", None)
    kwargs.pop("pin_memory", None)
    journal.write("upload", f"{func.__name__}(device=cuda)")
    return mark(torch.tensor(*args, **kwargs))


class _Memory:
    """Memory at the address of an object's ``__cuda_array_interface__``, for NumPy."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = owner.__cuda_array_interface__


def _over(data: Any) -> torch.Tensor:
    """Returns a tensor over an object's device memory, which keeps the object alive."""
    return mark(torch.from_numpy(np.asarray(_Memory(data))))


def _pin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if is_device(tensor):
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    return tensor if is_pinned(tensor) else pin(tensor.clone())


T = torch.Tensor
SPECIAL.update(
    {
        T.to: _to,
        T.cuda: _cuda,
        T.cpu: _cpu,
        T.copy_: _copy,
        T.pin_memory: _pin,
        torch.tensor: _from_data,
        torch.as_tensor: _from_data,
        torch.asarray: _from_data,
        T.is_pinned: lambda _func, args, _kwargs: is_pinned(args[0]),
    }
)
# Its arguments are parsed before the mode sees it, and a faked stream is no torch.Stream.
T.record_stream = lambda _self, _stream: None  # type: ignore[method-assign, assignment]
