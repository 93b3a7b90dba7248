"""Tests of device memory that one process lends to another, with a fake CUDA driver.

``scripts/gpu_check.sh`` checks this on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transfer_kit import MIB, fake_cuda

from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory, CudaMemoryError, granularity

STEP = 2 * MIB


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_cuda(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def fake(library: str) -> Iterator[ctypes.CDLL]:
    fake = ctypes.CDLL(library)
    gc.collect()
    assert (fake.fake_reserved(), fake.fake_mapped(), fake.fake_handles()) == (0, 0, 0)
    yield fake
    gc.collect()
    assert (fake.fake_reserved(), fake.fake_mapped(), fake.fake_handles()) == (0, 0, 0)


def _bytes(mapping: CudaMapping, offset: int, size: int) -> NDArray[np.uint8]:
    raw = (ctypes.c_uint8 * size).from_address(mapping.address + offset)
    return np.frombuffer(raw, np.uint8)


def test_owner_and_borrower_share_memory_until_it_is_replaced(
    library: str, fake: ctypes.CDLL
) -> None:
    owner = CudaMapping(0, 3 * STEP, library=library)
    owner.put(0, CudaMemory.create(0, STEP, library=library))
    lent = CudaMemory.create(0, 2 * STEP - 5, library=library)
    assert lent.size == 2 * STEP
    owner.put(STEP, lent)
    descriptor = lent.descriptor()
    assert not os.get_inheritable(descriptor)
    borrower = CudaMapping(0, 4 * STEP, library=library)
    borrower.put(2 * STEP, CudaMemory.of(descriptor, 0, 2 * STEP, library=library))
    os.close(descriptor)
    _bytes(borrower, 2 * STEP + 7, 3)[:] = 5
    assert _bytes(owner, STEP + 7, 3).tolist() == [5, 5, 5]
    # The owner reclaims its addresses at once; the borrower keeps the old memory.
    owner.put(STEP, CudaMemory.create(0, 2 * STEP, library=library))
    _bytes(owner, STEP + 7, 3)[:] = 9
    assert _bytes(borrower, 2 * STEP + 7, 3).tolist() == [5, 5, 5]
    assert fake.fake_handles() == 4
    del lent
    borrower.drop(0, 4 * STEP)
    gc.collect()
    assert fake.fake_handles() == 2


def test_pieces_are_mapped_and_replaced_only_as_a_whole(library: str, fake: ctypes.CDLL) -> None:
    mapping = CudaMapping(0, 3 * STEP + 1, library=library)
    assert mapping.size == 4 * STEP
    mapping.put(STEP, CudaMemory.create(0, 2 * STEP, library=library))
    one = CudaMemory.create(0, STEP, library=library)
    for offset in (STEP, 2 * STEP):
        with pytest.raises(ValueError, match="contain only a part of the piece"):
            mapping.put(offset, one)
    for offset in (-STEP, 4 * STEP, 3 * STEP + 1):
        with pytest.raises(ValueError, match="are outside the mapping"):
            mapping.put(offset, one)
    assert fake.fake_mapped() == 1
    mapping.put(0, one)
    mapping.put(3 * STEP, one)  # a piece may be mapped at several addresses
    _bytes(mapping, 0, 1)[0] = 3
    assert _bytes(mapping, 3 * STEP, 1)[0] == 3
    mapping.put(0, CudaMemory.create(0, 4 * STEP, library=library))
    assert fake.fake_mapped() == 1


def test_errors_name_the_operation_and_the_driver_error(
    library: str, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    assert granularity(0, library=library) == STEP
    with pytest.raises(
        CudaMemoryError, match=r"granularity of device 7: CUDA_ERROR_INVALID_DEVICE"
    ):
        CudaMapping(7, STEP, library=library)
    with pytest.raises(
        CudaMemoryError, match=r"allocate 2,147,483,648 B on device 0: .*OUT_OF_MEMORY"
    ):
        CudaMemory.create(0, 2 << 30, library=library)
    with pytest.raises(CudaMemoryError, match="the CUDA driver cannot share memory"):
        CudaMemory.create(0, STEP, library=str(tmp_path / "none.so"))
    read, write = os.pipe()
    try:
        with pytest.raises(CudaMemoryError, match=f"descriptor {read} as memory"):
            CudaMemory.of(read, 0, STEP, library=library)
    finally:
        os.close(read)
        os.close(write)
    mapping, memory = (
        CudaMapping(0, STEP, library=library),
        CudaMemory.create(0, STEP, library=library),
    )
    said_too_large = CudaMemory.of(descriptor := memory.descriptor(), 0, 2 * STEP, library=library)
    os.close(descriptor)
    wide = CudaMapping(0, 2 * STEP, library=library)
    with pytest.raises(CudaMemoryError, match=r"map 4,194,304 B .*INVALID_VALUE"):
        wide.put(0, said_too_large)
    for error, said in ((1, "INVALID_VALUE"), (999, "an unknown error")):
        fake.fake_fail(error)
        with pytest.raises(CudaMemoryError, match=said):
            mapping.put(0, memory)
        fake.fake_fail(error)
        with pytest.raises(CudaMemoryError, match="export"):
            memory.descriptor()
    mapping.put(0, memory)
    fake.fake_fail(1)
    with pytest.raises(CudaMemoryError, match="unmap"):
        mapping.drop(0, STEP)
    mapping.drop(0, STEP)


def _borrow(library: str, channel: socket.socket) -> None:
    _, (descriptor,), _, _ = socket.recv_fds(channel, 1, 1)
    mapping = CudaMapping(0, STEP, library=library)
    mapping.put(0, CudaMemory.of(descriptor, 0, STEP, library=library))
    seen = _bytes(mapping, 0, STEP)
    seen[:] = seen[::-1].copy()
    channel.sendall(b"x")


def test_another_process_maps_lent_memory(library: str, fake: ctypes.CDLL) -> None:
    mapping = CudaMapping(0, STEP, library=library)
    mapping.put(0, lent := CudaMemory.create(0, STEP, library=library))
    mine = _bytes(mapping, 0, STEP)
    mine[:] = values = np.random.default_rng(3).integers(256, size=STEP, dtype=np.uint8)
    here, there = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_borrow, args=(library, there))
    process.start()
    descriptor = lent.descriptor()
    socket.send_fds(here, [b"x"], [descriptor])
    os.close(descriptor)
    here.settimeout(60)
    assert here.recv(1) == b"x"
    process.join(60)
    assert process.exitcode == 0
    assert np.array_equal(mine, values[::-1])
    here.close()
    there.close()
    assert fake.fake_mapped() == 1
