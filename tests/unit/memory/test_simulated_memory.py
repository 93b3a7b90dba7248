"""Memory of the simulated CUDA device: what is freed, unmapped or unregistered too early."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import CudaError
from simulated_device import SimulatedDevice, at
from transfer_kit import MIB, fake_cuda, wait_until

from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory

SIZE = 4096


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def device(library: Path) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(library)
    yield device
    device.close()


@pytest.mark.parametrize("how", ["unregister", "free"])
def test_memory_that_goes_with_a_copy_in_flight_is_reported(
    device: SimulatedDevice, how: str
) -> None:
    slab, arena = device.memory(SIZE), device.host(SIZE)
    stream = device.stream()
    device.hold(copies=True)
    device.copy(stream, arena.ctypes.data, slab.ctypes.data, 64)
    if how == "unregister":
        device.unregister(arena)
        gone, text = arena, "unregistered: the host unregisters 4096 bytes"
    else:
        device.free(slab)
        gone, text = slab, "freed: the host frees 4096 bytes"
    (found,) = device.races
    assert found.startswith(text)
    gone[:] = slab[:] = 1
    device.host_writes(*at(gone)[:2])  # other memory may be there by now
    device.hold()
    device.synchronize()
    assert device.race_count == 1
    assert arena[0] == (how == "unregister")  # the copy does not touch memory that may be gone


def test_memory_is_not_freed_while_it_is_registered(device: SimulatedDevice) -> None:
    arena = device.host(SIZE)
    device.fake.fake_free(arena.ctypes.data, SIZE)
    (found,) = device.races
    assert found.endswith("which is still registered")


def test_a_complete_copy_is_in_flight_until_the_host_knows(device: SimulatedDevice) -> None:
    slab, arena = device.memory(SIZE), device.host(SIZE)
    stream = device.stream()
    device.copy(stream, slab.ctypes.data, arena.ctypes.data, 64)
    assert wait_until(lambda: device.fake.fake_outstanding() == 0)
    device.unregister(arena)
    assert device.race_count == 1


def test_device_memory_is_not_unmapped_while_a_kernel_may_read_it(
    device: SimulatedDevice, library: Path
) -> None:
    step = 2 * MIB
    mapping = CudaMapping(0, 2 * step, library=str(library))
    for offset in (0, step):
        mapping.put(offset, CudaMemory.create(0, step, library=str(library)))
    stream = device.stream()
    device.hold(kernels=True)
    kernel = device.kernel(stream, reads=[(mapping.address, 64, 2, step)])
    mapping.drop(step, step)
    (found,) = device.races
    assert found.startswith("unmapped: the host unmaps 2097152 bytes")
    assert "reads 2 rows of 64 bytes, one every 2097152 bytes" in found
    device.hold()
    device.synchronize()
    assert device.result(kernel) == 0  # it did not run
    device.kernel(stream, writes=[(mapping.address + step - 8, 16)])
    assert device.races[1].endswith("which is not all mapped")
    mapping.put(step, CudaMemory.create(0, step, library=str(library)))
    device.kernel(stream, writes=[(mapping.address + step - 8, 16)])
    device.copy(stream, mapping.address, mapping.address + step, 64)
    device.synchronize(stream=stream)
    mapping.drop(0, 2 * step)
    assert device.race_count == 2
    assert device.pageable_copies == 0


def test_unmapping_waits_for_bytes_that_are_being_written(
    device: SimulatedDevice, library: Path
) -> None:
    step = 2 * MIB
    mapping = CudaMapping(0, step, library=str(library))
    stream = device.stream()
    for number in range(20):  # the process would end
        mapping.put(0, CudaMemory.create(0, step, library=str(library)))
        device.kernel(stream, writes=[(mapping.address, step)])
        time.sleep(number * 5e-5)
        mapping.drop(0, step)
    assert device.race_count == 20


def test_mappings_of_one_piece_are_the_same_memory(device: SimulatedDevice, library: Path) -> None:
    step = 2 * MIB
    owner, borrower = (CudaMapping(0, 3 * step, library=str(library)) for _ in range(2))
    first, second = (CudaMemory.create(0, step, library=str(library)) for _ in range(2))
    owner.put(0, first)
    owner.put(step, second)
    borrower.put(0, second)
    borrower.put(step, first)
    writer, reader = device.stream(), device.stream()
    # 16 bytes from the last 8 of the first piece to the second piece, and a row before and behind
    device.kernel(writer, writes=[(owner.address + step - 108, 16, 3, 100)])
    for offset, size, races in (
        (step, 2 * MIB - 108, 0),
        (2 * step - 108, 1, 1),
        (2 * step - 92, 84, 1),
        (2 * step - 8, 8, 2),
        (0, 8, 3),
        (8, 84, 3),
        (91, 2, 4),
        (108, step - 108, 4),
    ):
        device.kernel(reader, reads=[(borrower.address + offset, size)])
        assert device.race_count == races
    device.host_reads(borrower.address + 92, 1)
    assert device.race_count == 5
    device.synchronize(stream=reader)
    borrower.drop(0, 2 * step)  # its own accesses are complete
    assert device.race_count == 5
    device.synchronize()


def test_registered_ranges_do_not_overlap(device: SimulatedDevice) -> None:
    arena = device.host(SIZE)
    for start, end in ((0, 1), (SIZE - 1, SIZE), (8, 16)):
        with pytest.raises(CudaError) as caught:
            device._call("cudaHostRegister", arena.ctypes.data + start, end - start, 0)
        assert caught.value.code == 712
    with pytest.raises(CudaError) as caught:
        device._call("cudaHostUnregister", arena.ctypes.data + 8)
    assert caught.value.code == 713
    device.fake.fake_fail_register(2)
    with pytest.raises(CudaError) as caught:
        device.host(SIZE)
    assert caught.value.code == 2
    assert device.registered_bytes == SIZE
    device.unregister(arena)
    assert device.registered_bytes == 0


def test_copies_of_pageable_memory_are_counted(device: SimulatedDevice) -> None:
    slab, arena, pageable = device.memory(SIZE), device.host(SIZE), np.zeros(SIZE, np.uint8)
    stream = device.stream()
    device.copy(stream, slab.ctypes.data, arena.ctypes.data, SIZE)
    device.copy_rows(stream, arena.ctypes.data, 64, slab.ctypes.data, 32, 32, 64)
    assert device.pageable_copies == 0
    device.copy(stream, pageable.ctypes.data, slab.ctypes.data, SIZE)
    device.copy(stream, slab.ctypes.data, arena.ctypes.data + 1, SIZE)  # to beyond the registration
    device.synchronize()
    assert device.pageable_copies == 2
