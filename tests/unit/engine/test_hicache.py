"""HiCache on a machine without an accelerator: copies of pages and host pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sgl_ext.engine.cpu import hicache


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("strided", [False, True])
def test_transfer_copies_pages_between_pools(page: int, strided: bool) -> None:
    pages, heads, dim = 12, 3, 8
    shape = (pages * page + page, heads, dim)  # SGLang pads a pool by a page
    sources = [torch.randn(shape) for _ in range(2)]
    targets = [torch.zeros(shape) for _ in range(2)]
    if strided:  # one layer of a block-major pool
        sources = [torch.randn(shape[0], 5, heads, dim)[:, 2] for _ in range(2)]
    before = [target.clone() for target in targets]
    from_pages, to_pages = torch.tensor([3, 1, 7]), torch.tensor([0, 9, 4])
    offsets = torch.arange(page)
    src = (from_pages.unsqueeze(1) * page + offsets).flatten()
    dst = (to_pages.unsqueeze(1) * page + offsets).flatten()
    hicache.transfer_kv_direct(sources, targets, src, dst, page)
    for source, target, old in zip(sources, targets, before, strict=True):
        old[dst] = source[src]
        assert torch.equal(target, old)


@pytest.mark.parametrize(("total", "reserve"), [(16 << 30, 2 << 30), (1 << 40, 10 << 30)])
def test_repeated_install_sets_the_copy_and_limits_the_host_reserve(
    total: int, reserve: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.pool_host import base, mha

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 10 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    hicache.install()
    hicache.install()
    assert mha.transfer_kv_direct is hicache.transfer_kv_direct
    limited = base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    assert limited == reserve


def test_host_pools_do_not_pin_memory() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    hicache.install()
    device = MHATokenToKVPool(64, 16, torch.float32, 2, 8, 3, "cpu", False, enable_alt_stream=False)
    sizes: Any = (2.0, 0, 16, "layer_first")
    if infos := getattr(device, "get_device_pool_infos", None):
        host = MHATokenToKVPoolHost(
            infos()[0].buffer_info, *sizes, device_capacity_tokens=64, start_layer=0, end_layer=2
        )
    else:  # SGLang 0.5.22
        host = MHATokenToKVPoolHost(device, *sizes)
    assert not host.pin_memory
    page = torch.randn_like(host.get_dummy_flat_data_page())
    host.set_from_flat_data_page(32, page)
    assert torch.equal(host.get_data_page(32).flatten(), page)
