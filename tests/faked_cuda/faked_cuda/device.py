"""``torch.cuda`` of the faked device: an H100 without memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from faked_cuda import streams

TOTAL = 16 << 30
"""Bytes that the device claims to have"""
CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"
_PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=TOTAL, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, is_integrated=False, is_multi_gpu_board=False,
    gcnArchName="", uuid="00000000-0000-0000-0000-000000000000", pci_bus_id=0, pci_device_id=0,
    pci_domain_id=0,
)  # fmt: skip


def _memory(device: Any = None) -> tuple[int, int]:
    return min(psutil.virtual_memory().available, TOTAL), TOTAL


@contextmanager
def _device(device: Any = None) -> Iterator[None]:
    yield


def _returning(value: object, *names: str) -> dict[str, Any]:
    """Returns a function of its own for each name: torch's compiler keeps rules by function."""

    def new() -> Any:
        return lambda *_args, **_kwargs: value

    return {name: new() for name in names}


class _NoGraph:
    """Stand-in of the classes of CUDA graphs, which cannot be constructed."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        raise RuntimeError("the faked device has no CUDA graphs; start with --disable-cuda-graph")


FUNCTIONS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_compiled": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 1,
    "_device_count_nvml": lambda: 1,
    "current_device": lambda: 0,
    "_exchange_device": lambda _device: 0,
    "_maybe_exchange_device": lambda _device: 0,
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_arch_list": lambda: ["sm_90"],
    "can_device_access_peer": lambda device, peer: device == peer,
    "mem_get_info": _memory,
    "memory_stats": lambda device=None: dict.fromkeys(
        ("reserved_bytes.all.current", "reserved_bytes.all.peak", "allocated_bytes.all.current",
         "allocated_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0,
    ),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "device": _device,
    "Stream": streams.Stream,
    "ExternalStream": streams.ExternalStream,
    "Event": streams.Event,
    "StreamContext": streams.StreamContext,
    "stream": streams.StreamContext,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "synchronize": streams.synchronize,
    "CUDAGraph": type("CUDAGraph", (_NoGraph,), {}),
    "graph": type("graph", (_NoGraph,), {}),
    **_returning(
        None, "_lazy_init", "init", "set_device", "empty_cache", "ipc_collect", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "reset_peak_memory_stats",
        "reset_max_memory_allocated", "set_per_process_memory_fraction", "set_sync_debug_mode",
    ),
    **_returning(
        0, "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "utilization", "initial_seed", "get_sync_debug_mode",
    ),
}  # fmt: skip


class _Generator(torch.Generator):
    """Generator of random numbers of the host, whichever device it is for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


def install() -> None:
    """Replaces functions and classes of ``torch.cuda``, and what else tells that CUDA is there."""
    for name, function in FUNCTIONS.items():
        setattr(torch.cuda, name, function)
        for module in (torch.cuda.streams, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs):
            if hasattr(module, name) and name not in ("device",):
                setattr(module, name, function)
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch.Generator = _Generator  # type: ignore[misc]
    torch._C._cuda_getCurrentRawStream = lambda _device: streams.current_stream().cuda_stream
