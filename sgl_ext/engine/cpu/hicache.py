"""HiCache on a machine without an accelerator, so that it can serve as a baseline there.

HiCache copies pages between a device pool and a host pool; here both are host memory. Three of its
parts exist only for accelerators, and none has an extension point for platforms in 0.5.23:

- Host pools pin their memory, and the pages that they read from storage, for a device's copies. The
  base class's constructor is told not to, because its callers always ask for it.
- ``transfer_kv_direct`` comes from compiled kernels. The name under which host pools call it is set
  to a copy in torch. The platform makes ``direct`` and ``layer_first``, which need nothing else,
  the only choice.
- 10 GiB of host memory are reserved for the rest of the machine, which is most of a small machine.
  The reserve is therefore limited to an eighth of the memory.
"""

from __future__ import annotations

import psutil
import torch
from sglang.srt.mem_cache.pool_host import base, mha, mla

from sgl_ext.engine.core import hooks
from sgl_ext.engine.cpu import hicache_link

_RESERVE_FRACTION = 8

_ONE_LAYER = 2
"""Number of buffers in a copy of one layer: K and V."""


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies token slots of every layer, whole pages at a time.

    Args:
        src_layers, dst_layers: one tensor ``[slots, ...]`` per layer.
        src_indices, dst_indices: slots ``[tokens]``, page-aligned runs of ``page_size`` slots.
    """
    link = hicache_link.current
    if link is not None and len(src_layers) == _ONE_LAYER:  # a load; a store has all layers
        link.moved(src_layers, len(src_indices))
    src_pages = src_indices.cpu()[::page_size] // page_size
    dst_pages = dst_indices.cpu()[::page_size] // page_size
    for src, dst in zip(src_layers, dst_layers, strict=True):
        pages = _by_page(src, page_size).index_select(0, src_pages)
        _by_page(dst, page_size).index_copy_(0, dst_pages, pages)


def _by_page(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns a view ``[slots // page_size, page_size, ...]`` of ``layer``, with any strides."""
    whole = layer.shape[0] // page_size * page_size
    return layer[:whole].unflatten(0, (-1, page_size))


def _unpinned(*args: object, **kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    return args, {**kwargs, "pin_memory": False}


_POOLS = "sglang.srt.mem_cache.pool_host"
HOOKS = (
    hooks.Hook(
        f"{_POOLS}.base.HostKVCache.__init__",
        "before",
        _unpinned,
        "host pools always ask for pinned memory",
    ),
)
SEAMS = tuple(
    hooks.Seam(f"transfer_kv_direct in {copies}", hooks.uses(copies, "transfer_kv_direct"))
    for pool in ("mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost")
    for way in ("load_to_device_per_layer", "backup_from_device_all_layer")
    for copies in (f"{_POOLS}.{pool}.{way}",)
)
"""Copies of host pools, which look ``transfer_kv_direct`` up in their modules."""


def install() -> None:
    """Installs the three parts."""
    hicache_link.install()
    hooks.apply(HOOKS, SEAMS)
    for pool in (mha, mla):
        pool.transfer_kv_direct = transfer_kv_direct
    reserve = psutil.virtual_memory().total // _RESERVE_FRACTION
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = min(base.HICACHE_HOST_MEMORY_RESERVE_BYTES, reserve)
