"""Tests of the slab: shape, huge pages, refusals, and release of its memory."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

from sgl_ext.memory import backing, limits
from sgl_ext.memory import slab as slab_module
from sgl_ext.memory.mapping import HUGE_PAGE, PAGE, create
from sgl_ext.memory.slab import DTYPES, HostSlab, Layout, SlabError

LAYOUT = Layout(
    page=16, layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", fingerprint="0123456789abcdef"
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_holds_all_layers_of_its_tokens(dtype: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    slab = HostSlab.create(layout, 5)
    tensor = slab.tensor()
    assert tensor.shape == (5, 16, 3, 2, 2, 8)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    assert slab.size == tensor.nbytes == 5 * layout.block_bytes
    assert slab.address == tensor.data_ptr()
    assert slab.address % HUGE_PAGE == 0


def test_layers_are_strided_views() -> None:
    tokens = HostSlab.create(LAYOUT, 5).tensor().flatten(0, 1)
    keys, values = tokens[:, 1, 0], tokens[:, 1, 1]
    assert keys.stride() == values.stride() == (3 * 2 * 2 * 8, 8, 1)
    values[37] = 1.0
    assert not keys.any()
    assert tokens.sum() == 2 * 8
    assert tokens[37, 1, 1].sum() == 2 * 8


@pytest.mark.usefixtures("no_garbage")
def test_a_tensor_keeps_the_memory_of_its_slab_alive() -> None:
    before = psutil.Process().num_fds()
    tensor = HostSlab.create(LAYOUT, 4).tensor()
    assert psutil.Process().num_fds() == before
    tensor[3] = 7.0
    assert tensor[3].min() == 7.0


@pytest.mark.usefixtures("no_garbage")
def test_deleted_slabs_leave_no_descriptors_or_mappings() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("sgl_ext-kv")

    before = psutil.Process().num_fds(), mapped()
    for _ in range(20):
        slab = HostSlab.create(LAYOUT, 4)
        assert slab.tensor().shape[0] == 4
        del slab
    assert (psutil.Process().num_fds(), mapped()) == before


def test_huge_pages_keep_the_contents() -> None:
    slab = HostSlab.create(LAYOUT, 3000)
    pattern = torch.arange(slab.size // 2, dtype=torch.int32).to(torch.bfloat16)
    slab.tensor().flatten().copy_(pattern)
    slab.back_with_huge_pages(0, 3000)  # whether it succeeds depends on the kernel
    slab.back_with_huge_pages(1000, 1001)
    assert torch.equal(slab.tensor().flatten(), pattern)


def test_backing_stays_ahead_of_the_blocks_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "AHEAD", HUGE_PAGE)
    monkeypatch.setattr(backing, "STEP", HUGE_PAGE)
    slab = HostSlab.create(LAYOUT, 4000)  # of 3 KiB: slightly less than six huge pages
    slab.tensor()[3999] = 2.0
    there = backing.Backing(slab)
    if slab.back_with_huge_pages(0, 4000) not in (0, errno.EAGAIN, errno.EBUSY):
        pytest.skip("this kernel refuses huge pages")

    def reaches(blocks: int) -> bool:
        end = time.monotonic() + 20
        while there.backed < blocks and time.monotonic() < end:
            time.sleep(0.01)
        return there.backed >= blocks

    ahead = HUGE_PAGE // LAYOUT.block_bytes
    assert reaches(1 + ahead)
    assert there.backed < 1 + 2 * ahead + 1
    there.need(2000)
    assert reaches(2000 + ahead)
    there.need(10**9)
    assert reaches(4000)
    assert there.backed == 4000
    assert slab.tensor()[3999].min() == 2.0
    assert not slab.tensor()[:3999].any()
    assert there.close()
    assert not there.refused


def test_backing_ends_when_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [errno.EAGAIN, errno.EBUSY, errno.EINVAL]
    monkeypatch.setattr(HostSlab, "back_with_huge_pages", lambda *_: answers.pop(0))
    there = backing.Backing(HostSlab.create(LAYOUT, 40))
    there._thread.join(20)
    assert there.refused
    assert not answers
    assert there.close()
    assert there.backed == 0


@pytest.mark.parametrize(
    ("layout", "blocks", "message"),
    [
        (msgspec.structs.replace(LAYOUT, dtype="float8_e5m2"), 4, "found float8_e5m2"),
        (msgspec.structs.replace(LAYOUT, layers=0, page=-1), 4, "page -1, layers 0"),
        (LAYOUT, 0, "blocks 0"),
        (LAYOUT, 2.5, "blocks 2.5"),
        (msgspec.structs.replace(LAYOUT, head_dim=float("nan")), 2, "head_dim nan"),
        (msgspec.structs.replace(LAYOUT, fingerprint="y" * 3_000_000), 2, "fingerprint"),
        (msgspec.structs.replace(LAYOUT, fingerprint="\ud800"), 2, "fingerprint"),
        (LAYOUT, 1 << 40, f"needs {(1 << 40) * LAYOUT.block_bytes:,} B of memory"),
    ],
)
@pytest.mark.usefixtures("no_garbage")
def test_impossible_slabs_are_refused(layout: Layout, blocks: int, message: str) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(SlabError, match=message):
        HostSlab.create(layout, blocks)
    assert psutil.Process().num_fds() == before


def test_slabs_cannot_be_pickled_or_copied() -> None:
    slab = HostSlab.create(LAYOUT, 6)
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="a mapping cannot be pickled"):
            send(slab)


def test_invalid_ranges_of_blocks_are_refused() -> None:
    slab = HostSlab.create(LAYOUT, 6)
    for start, end in ((-1, 3), (3, 2), (0, 7)):
        with pytest.raises(SlabError, match=f"blocks {start} to {end} of 6"):
            slab.back_with_huge_pages(start, end)


@pytest.mark.usefixtures("no_garbage")
def test_a_failed_mapping_leaves_no_file_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "no address space")

    monkeypatch.setattr(slab_module, "Mapping", fail)
    before = psutil.Process().num_fds()
    with pytest.raises(SlabError, match=r"cannot allocate a slab of 6 blocks .*no address space"):
        HostSlab.create(LAYOUT, 6)
    assert psutil.Process().num_fds() == before


def test_a_control_group_limits_the_available_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Path.read_text
    files = {
        "/proc/self/cgroup": "0::/some/group\n",
        "/sys/fs/cgroup/some/group/memory.max": "max\n",
        "/sys/fs/cgroup/some/memory.max": "5000000\n",
        "/sys/fs/cgroup/some/memory.current": "3000000\n",
        "/sys/fs/cgroup/some/memory.stat": "shmem 9\ninactive_file 1500000\nactive_file 500000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda p, *a: files.get(str(p)) or real(p, *a))
    assert limits.available_memory() == 4_000_000
    with pytest.raises(SlabError, match="4,000,000 B are available"):
        HostSlab.create(LAYOUT, 2000)


EXIT = """
import atexit, sys, threading, time
import numpy as np
arrays = []
atexit.register(lambda: print(int(np.asarray(arrays[0]).sum()), flush=True))
from sgl_ext.memory.backing import Backing
from sgl_ext.memory.slab import *
from sgl_ext.memory.transfer import TransferEngine
slab = HostSlab.create({layout!r}, 100000)
slab.tensor()[0] = 1.0
arrays.append(slab.mapping)
backing = Backing(slab)
backing.need(100000)
engine = TransferEngine()
engine.register(slab.address, slab.size, owner=slab)
half = slab.size // 2
copy = (slab.address, slab.address + half, half, 1, half, half)
ticket = engine.submit([copy], engine.host_lane())
"""


def test_exit_succeeds_with_a_copy_in_flight_and_a_late_reader() -> None:
    result = subprocess.run(
        [sys.executable, "-c", EXIT.format(layout=LAYOUT)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


def test_the_file_of_a_slab_cannot_be_resized() -> None:
    slab = HostSlab.create(LAYOUT, 6)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)
    assert np.asarray(slab.mapping).shape == (slab.size,)


def test_blocks_beyond_the_own_blocks_have_addresses() -> None:
    slab = HostSlab.create(LAYOUT, 4, beyond=400)
    assert (slab.own, slab.blocks) == (4, 404)
    assert (slab.size, slab.reach) == (4 * LAYOUT.block_bytes, 404 * LAYOUT.block_bytes)
    tensor = slab.tensor()
    assert tensor.shape[0] == 404
    tensor[3] = 1.0
    fd = create("sgl_ext-other", 4 * PAGE)
    slab.mapping.put(300 * PAGE, fd, PAGE, 3 * PAGE)  # four blocks of 3 KiB
    os.close(fd)
    tensor[400:] = 2.0
    assert tensor[400:].min() == 2.0
    assert tensor[:4].max() == 1.0
    with pytest.raises(SlabError, match="0 to 5 of 4"):
        slab.back_with_huge_pages(0, 5)
    with pytest.raises(SlabError, match="0 or more blocks beyond"):
        HostSlab.create(LAYOUT, 4, beyond=-1)
