"""The torch function mode that keeps tensors of the faked device apart from those of the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from faked_cuda import journal
from faked_cuda.storage import (
    as_device,
    is_device,
    mark,
    pin,
    storage_of,
    tensors_in,
)
from faked_cuda.streams import drain

Special = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
SPECIAL: dict[Any, Special] = {}
"""Functions of torch that are not :func:`ordinary`; :mod:`.transfers` and :mod:`.reads` fill it."""
_ACROSS = {
    "__getitem__", "__set__", "__setitem__", "_has_compatible_shallow_copy_type", "copy_",
    "expand_as", "index_put", "index_put_",
    "is_set_to", "reshape_as", "resize_as_", "set_", "to", "type_as", "view_as",
}  # fmt: skip
"""Names of functions that take tensors of the device and of the host at once."""


class FakedCuda(TorchFunctionMode):
    """Mode of every thread of a process in which CUDA is faked."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return SPECIAL.get(func, ordinary)(func, args, dict(kwargs or {}))


def ordinary(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function on the host; its results are the device's if it asked for that.

    Without a device among its arguments, results are where the input tensors are.
    """
    inputs = list(tensors_in((args, kwargs)))
    on_device = any(is_device(tensor) for tensor in inputs)
    if on_device:
        _require_one_device(func, inputs)
        drain()
    target = as_device(kwargs.get("device"))
    if target is None and func in _device._device_constructors():
        target = _device.CURRENT_DEVICE
    if target is not None and target.type == "cuda":
        kwargs["device"] = "cpu"
    pinned = kwargs.pop("pin_memory", False)
    known = {storage._cdata for tensor in inputs if (storage := storage_of(tensor)) is not None}
    result = func(*args, **kwargs)
    placed = on_device if target is None else target.type == "cuda"
    if placed or pinned:
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in known:
                mark(tensor) if placed else pin(tensor)
    return result


def _require_one_device(func: Any, inputs: list[torch.Tensor]) -> None:
    """Raises what torch raises if tensors of the host are among a device function's arguments."""
    name = getattr(func, "__name__", "")
    if name in _ACROSS or hasattr(func, "__code__"):
        return
    if any(tensor.dim() and not is_device(tensor) and not tensor.is_meta for tensor in inputs):
        where = ["cuda:0" if is_device(tensor) else str(tensor.device) for tensor in inputs]
        refuse(
            RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got {where} (faked)"
            )
        )


def refuse(error: Exception) -> None:
    """Writes an error of a device into the journal and raises it.

    With SGLEXT_FAKED_CUDA_LENIENT=1 it is not raised and the host's result counts, so that one run
    finds all such places.
    """
    journal.write("refused", str(error))
    if os.environ.get("SGLEXT_FAKED_CUDA_LENIENT") != "1":
        raise error


mode = FakedCuda()


def _of_context(
    self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Body of torch's ``with torch.device(...)``, for calls within functions of torch."""
    kwargs = dict(kwargs or {})
    if func not in _device._device_constructors() or kwargs.get("device") is not None:
        return func(*args, **kwargs)
    on_device = self.device.type == "cuda"
    result = func(*args, **{**kwargs, "device": "cpu" if on_device else self.device})
    if on_device:
        for tensor in tensors_in(result):
            mark(tensor)
    return result


def install() -> None:
    """Puts the mode on the stack of this thread and of all later ones."""
    mode.__enter__()
    _device.DeviceContext.__torch_function__ = _of_context  # type: ignore[assignment]
    begin: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        with mode:
            begin(thread)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]


__all__ = ["SPECIAL", "install", "mode", "ordinary", "refuse"]
