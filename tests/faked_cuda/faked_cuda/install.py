"""Installation of the fakes, directly after the first import of torch."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

SETTINGS = {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
}
"""Environment of a process in which CUDA is faked, unless it is set otherwise"""


def torch_imported(torch: ModuleType) -> None:
    """Fakes CUDA in this process."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from faked_cuda import device, mode, reads, transfers  # noqa: F401

    _declare_torchvision()
    device.install()
    _without_nccl(torch)
    _operators_of_cuda(torch)
    mode.install()


def _declare_torchvision() -> None:
    """Declares the operators that torchvision's CPU build expects; CUDA builds bring them."""
    from sgl_ext.engine.cpu import torchvision_bridge

    torchvision_bridge.declare_operators()


def _without_nccl(torch: Any) -> None:
    """Lets groups of processes that ask for NCCL use Gloo."""
    import torch.distributed as distributed

    def replaced(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            args = tuple("gloo" if arg == "nccl" else arg for arg in args)
            if isinstance(backend := kwargs.get("backend"), str) and "nccl" in backend:
                kwargs["backend"] = "gloo"
            if kwargs.get("device_id") is not None:
                kwargs["device_id"] = None
            return original(*args, **kwargs)

        return function

    distributed.init_process_group = replaced(distributed.init_process_group)
    distributed.new_group = replaced(distributed.new_group)


def _operators_of_cuda(torch: Any) -> None:
    """Registers SGLang's operators of Python for the CPU, and runs them within the mode.

    torch leaves all function modes before it calls an operator.
    """
    from faked_cuda.mode import mode

    original = torch.library.Library.impl

    def impl(self: Any, name: Any, function: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key != "CUDA" or not function.__module__.startswith("sglang"):
            return original(self, name, function, dispatch_key, **options)

        def within(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return function(*args, **kwargs)

        return original(self, name, within, "CPU", **options)

    torch.library.Library.impl = impl
