"""SGLang's out-of-tree platform for machines without an accelerator.

SGLang's own CPU engine needs the compiled ``sgl_kernel``. This platform runs every operation in its
native PyTorch form instead, and so runs wherever torch does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any

from sgl_ext import SUPPORTED_SGLANG
from sgl_ext.engine.core import hooks

PLATFORM_NAME = "sgl_ext_cpu"
"""Entry-point name; ``SGLANG_PLATFORM=sgl_ext_cpu`` selects the platform on any machine."""

_LOG = logging.getLogger(__name__)

_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
_our_binding: str | None = None


def accelerator_name() -> str | None:
    """Returns torch's name of the first accelerator that torch can use; None if there is none."""
    import torch

    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    for name in ("xpu", "npu", "musa", "hpu", "mps"):
        backend = getattr(torch, name, None)
        if backend is not None and getattr(backend, "is_available", lambda: False)():
            return name
    return None


def reason_inactive() -> str | None:
    """Returns why SGLang should not use the platform in this process; None if it should."""
    if (found := hooks.installed_sglang()) not in SUPPORTED_SGLANG:
        return f"it requires SGLang {' or '.join(SUPPORTED_SGLANG)}, found {found}"
    if os.environ.get("SGLANG_PLATFORM"):
        # SGLang loads only the entry point that is named there, so it must be this one.
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine"
    others = [ep.name for ep in entry_points(group="sglang.srt.platforms")]
    others = [name for name in others if name != PLATFORM_NAME]
    if others:
        return f"the platform plugin {others[0]!r} is installed (SGLang supports only one)"
    accelerator = accelerator_name()
    return accelerator and f"torch has the accelerator {accelerator!r}"


def thread_binding(ranks: int, cores: Sequence[int]) -> str:
    """Returns the cores of each rank in SGLang's format, such as ``0,1|2,3``.

    Cores are split evenly in order. With fewer cores than ranks, ranks share them in turn.
    """
    if ranks > len(cores):
        groups = [[cores[rank % len(cores)]] for rank in range(ranks)]
    else:
        bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
        groups = [list(cores[low:high]) for low, high in pairwise(bounds)]
    return "|".join(",".join(map(str, group)) for group in groups)


def computes_bfloat16() -> bool:
    """Returns whether oneDNN multiplies matrices of bfloat16 on this CPU.

    Elsewhere torch emulates the product element by element.
    """
    import torch

    known = torch.backends.mkldnn.is_available()
    return bool(known and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _wants_float32(view: Any) -> bool:
    """Returns whether the platform sets the dtype to float32.

    It does so if no dtype was asked for and this CPU does not compute in bfloat16.
    """
    if view.dtype != "auto" or computes_bfloat16():
        return False
    # HiCache's files do not record their dtype: a server with another one would read them.
    return view.hicache_storage_backend is None and not _is_quantized(view)


def _is_quantized(view: Any) -> bool:
    """Returns whether the weights are quantized.

    Most quantization methods compute in half precision only.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    if view.quantization:
        return True
    try:
        config = get_config(
            view.model_path, trust_remote_code=view.trust_remote_code, revision=view.revision
        )
    except (OSError, ValueError):
        return False  # SGLang reports the error
    return getattr(config, "quantization_config", None) is not None


def _cpu_defaults(server_args: object, previous: Any) -> None:
    """Sets the attention backend, the dtype and the cores of each rank on the CPU.

    The backend avoids SGLang's AMX backend, which needs the compiled kernels. The dtype, unless it
    was asked for, is one that the CPU computes in. SGLang refuses several ranks on one NUMA node
    unless each has its cores.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.device == "cpu":
        if view.attention_backend is None:
            declare_resolution(server_args, PLATFORM_NAME, attention_backend="torch_native")
        if _wants_float32(view):
            _LOG.warning(
                "torch emulates bfloat16 on this CPU: serving in float32, which is many times "
                "faster; set --dtype to use another"
            )
            declare_resolution(server_args, PLATFORM_NAME, dtype="float32")
        _bind_threads(view.tp_size * view.pp_size * view.dp_size)
    previous(server_args)


def _hicache_defaults(server_args: object, previous: Any) -> None:
    """Selects the backend and layout for which HiCache's copies exist here; see :mod:`.hicache`."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.device == "cpu" and view.enable_hierarchical_cache:
        declare_resolution(
            server_args,
            PLATFORM_NAME,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
        )
    previous(server_args)


def _bind_threads(ranks: int) -> None:
    """Sets the binding that child processes inherit, unless the user has set one."""
    global _our_binding
    if os.environ.get(_BINDING) not in (None, _our_binding):
        return
    os.environ.pop(_BINDING, None)  # set by an earlier engine of this process
    if ranks > 1:
        _our_binding = thread_binding(ranks, sorted(os.sched_getaffinity(0)))
        os.environ[_BINDING] = _our_binding


def _platform_class() -> type:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class NativeCpuPlatform(CpuDeviceMixin, SRTPlatform):
        """Platform of plain torch on the CPU: no Triton, no graphs, no compiled SGLang kernels."""

        _enum = PlatformEnum.OOT

        def get_device(self, device_id: int = 0) -> str:  # noqa: ARG002
            return "cpu"  # resolution expects SGLang's default device as a string

        def is_pin_memory_available(self, device: object = None) -> bool:  # noqa: ARG002
            return False

        def get_dispatch_key_name(self) -> str:
            return "native"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def init_backend(self) -> None:
            from sgl_ext.engine.cpu import attention, hicache, packed_linear

            attention.install()
            hicache.install()
            packed_linear.install()

    register_resolution_hook("handle_cpu_backends")(_cpu_defaults)
    register_resolution_hook("handle_hicache")(_hicache_defaults)
    return NativeCpuPlatform


def __getattr__(name: str) -> type:
    # SGLang resolves the class by name, and only where activate_cpu_platform() has named it.
    # Importing this module must not import SGLang, because doctor calls it without a start.
    if name == "NativeCpuPlatform":
        return _platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
