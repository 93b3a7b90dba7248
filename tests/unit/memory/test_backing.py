"""Tests of the backing of a slab with huge pages, also after lent memory is replaced."""

from __future__ import annotations

import errno
import threading

import pytest
import torch
from conftest import until

from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.memory import backing
from sgl_ext.memory.lent import Lendable
from sgl_ext.memory.mapping import HUGE_PAGE
from sgl_ext.memory.slab import HostSlab, Layout

LAYOUT = Layout(4, layers=1, kv_heads=1, head_dim=128, dtype="float32", fingerprint="none")
"""Layout with blocks of 4 KiB."""
BLOCKS, STEP = 4096, 512


@pytest.fixture
def slab(monkeypatch: pytest.MonkeyPatch) -> HostSlab:
    monkeypatch.setattr(backing, "AHEAD", 0)
    monkeypatch.setattr(backing, "STEP", STEP * LAYOUT.block_bytes)
    return HostSlab.create(LAYOUT, BLOCKS)


def test_replaced_memory_is_backed_again_when_its_blocks_are_used(
    slab: HostSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks blocks that a worker had lent and that are allocated again."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(HostSlab, "back_with_huge_pages", lambda _, *at: asked.append(at) or 0)
    there = backing.Backing(slab)
    allocator = BlockGroupAllocator(
        (BLOCKS - 1) * 4, 4, torch.float32, "cpu", None, False, expected_tokens=4
    )
    allocator.on_allocate = there.need
    slots = allocator.alloc((BLOCKS - 1) * 4)
    until(lambda: there.backed == BLOCKS)
    allocator.free(slots)
    lendable = Lendable(slab.mapping, slab.fd, slab.name, LAYOUT.block_bytes, slab.size)
    for replaced in (1000, 40):
        asked.clear()
        assert allocator.shrink(1500)
        lendable.replace(replaced * LAYOUT.block_bytes)
        allocator.groups.grow(1500)
        allocator.free(allocator.alloc((BLOCKS - 1) * 4))
        until(lambda: there.backed == BLOCKS)
        assert asked[0][0] == BLOCKS - replaced
        assert asked[-1][1] == BLOCKS
    assert there.close()


def test_memory_replaced_during_backing_is_backed_again(
    slab: HostSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    asked: list[tuple[int, int]] = []

    def back(_: HostSlab, start: int, end: int) -> int:
        asked.append((start, end))
        begun.release()
        assert go_on.acquire(timeout=30)
        return 0

    monkeypatch.setattr(HostSlab, "back_with_huge_pages", back)
    there = backing.Backing(slab)
    assert begun.acquire(timeout=30)
    lendable = Lendable(slab.mapping, slab.fd, slab.name, 0, slab.size)
    lendable.replace(slab.size)
    there.need(1)
    go_on.release()
    assert begun.acquire(timeout=30)  # the same step is backed again
    go_on.release(10)
    assert asked == [(0, STEP), (0, STEP)]
    assert there.close()


def test_a_step_that_the_kernel_refuses_is_skipped(
    slab: HostSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def back(_: HostSlab, start: int, _end: int) -> int:
        asked.append(start)
        return errno.EINVAL if start == STEP else 0

    monkeypatch.setattr(HostSlab, "back_with_huge_pages", back)
    there = backing.Backing(slab)
    there.need(BLOCKS)
    until(lambda: there.backed == BLOCKS)
    assert there.refused
    assert asked == list(range(0, BLOCKS, STEP))
    assert there.close()


def test_replacement_memory_is_aligned_for_huge_pages(slab: HostSlab) -> None:
    lendable = Lendable(slab.mapping, slab.fd, slab.name, 0, slab.size)
    for pages in (3, 700, 1024):
        lendable.replace(pages * 4096)
        place = slab.size
        for extent in reversed(lendable.extents):
            place -= extent.size
            assert extent.offset % HUGE_PAGE == place % HUGE_PAGE
    slab.tensor()[1:] = 1.0
    if slab.back_with_huge_pages(0, BLOCKS) not in (0, errno.EAGAIN, errno.EBUSY):
        pytest.skip("this kernel refuses huge pages")
    assert slab.tensor()[1:].min() == 1.0
