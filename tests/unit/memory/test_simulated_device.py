"""Simulated CUDA device: jobs that are not ordered are races, and no others."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import CudaError
from simulated_device import SimulatedDevice, at, checksum, pattern
from transfer_kit import fake_cuda, wait_until

from sgl_ext.memory.transfer import Priority, TransferEngine

SEEDS = range(1, 21)
SIZE = 4096


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def device(library: Path) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(library)
    yield device
    device.close()


def test_an_unordered_copy_is_a_race_in_every_schedule(library: Path) -> None:
    differs = 0
    for seed in SEEDS:
        device = SimulatedDevice(library, seed)
        slab, arena = device.memory(SIZE, "slab"), device.host(SIZE, "arena")
        forward, copies = device.stream(), device.stream()
        with device.tagged("forward 7"):
            device.kernel(forward, writes=[at(slab)], fill=1)
        with device.tagged("store of page 5"):
            device.copy(copies, arena.ctypes.data, slab.ctypes.data + 8, 64)
        device.synchronize()
        (race,) = device.races
        assert race.startswith("race: copy ")
        assert "(store of page 5) reads 64 bytes at" in race
        assert "[slab + 8], not ordered after kernel" in race
        assert "(forward 7) writes 4096 bytes" in race
        differs += not np.array_equal(arena[:64], pattern(1, 64))
        device.close()
    assert differs > 0


@pytest.mark.parametrize("kind", ["kernel", "copy"])
def test_what_a_started_job_will_write_is_poisoned(device: SimulatedDevice, kind: str) -> None:
    slab, arena = device.memory(SIZE), device.host(SIZE)
    stream, poisoned = device.stream(), False
    for seed in range(1, 2001):
        device.seed(seed)
        if kind == "kernel":
            device.kernel(stream, writes=[at(slab)], fill=1)
        else:
            device.copy(stream, slab.ctypes.data, arena.ctypes.data, SIZE)
        while not device.query(stream=stream):
            poisoned |= bool(slab[100] == 0xA5)
        if poisoned:
            break
    assert poisoned


@pytest.mark.parametrize("seed", SEEDS)
def test_ordered_copies_see_what_was_written(library: Path, seed: int) -> None:
    with SimulatedDevice(library, seed) as device:
        slab, arena = device.memory(SIZE), device.host(SIZE)
        forward, copies = device.stream(), device.stream()
        for step in range(1, 6):
            device.kernel(forward, writes=[at(slab)], fill=step)
            device.wait(copies, device.record(forward))
            device.copy(copies, arena.ctypes.data, slab.ctypes.data, SIZE)
            device.wait(forward, stored := device.record(copies))
            device.synchronize(event=stored)
            device.host_reads(*at(arena)[:2])
            assert np.array_equal(arena, pattern(step, SIZE))


def test_a_load_into_blocks_that_a_kernel_still_writes_is_a_race(device: SimulatedDevice) -> None:
    slab, arena = device.memory(SIZE), device.host(SIZE)
    forward, copies = device.stream(), device.stream()
    device.kernel(forward, writes=[at(slab, 0, 64)])
    device.copy(copies, slab.ctypes.data + 63, arena.ctypes.data, 64)
    assert device.race_count == 1
    device.copy(copies, slab.ctypes.data + 1024, arena.ctypes.data + 64, 64)
    assert device.race_count == 1
    device.kernel(forward, reads=[at(slab, 1024, 1025)])  # the forward does not wait for its load
    assert device.race_count == 2


def test_the_host_is_ordered_by_what_it_waited_for(device: SimulatedDevice) -> None:
    slab, arena = device.memory(SIZE), device.host(SIZE)
    stream = device.stream()
    device.hold(copies=True)
    device.copy(stream, arena.ctypes.data, slab.ctypes.data, 64)
    event = device.record(stream)
    assert not device.query(event=event)
    assert not device.query(stream=stream)
    device.host_reads(*at(arena, 0, 64)[:2])
    assert device.races[0].startswith("race: the host reads 64 bytes")
    device.hold()
    assert wait_until(lambda: device.query(event=event))
    device.host_writes(*at(arena)[:2])
    device.kernel(device.LEGACY, writes=[at(arena)])  # any stream is behind the host
    assert device.race_count == 1


def test_a_wait_refers_to_the_record_of_its_time(device: SimulatedDevice) -> None:
    slab = device.memory(SIZE)
    first, second, third = (device.stream() for _ in range(3))
    event = device.event()
    device.wait(second, event)  # never recorded: nothing to wait for
    assert device.query(event=event)
    device.synchronize(event=event)
    device.kernel(first, writes=[at(slab, 0, 64)])
    device.record(first, event)
    device.wait(second, event)
    device.kernel(first, writes=[at(slab, 64, 128)])
    device.record(first, event)  # moves the event, but not the wait
    device.kernel(second, reads=[at(slab, 0, 64)])
    assert device.race_count == 0
    device.kernel(second, reads=[at(slab, 64, 128)])
    assert device.race_count == 1
    device.wait(third, event)
    device.kernel(third, reads=[at(slab, 0, 128)])
    assert device.race_count == 1


def test_a_recorded_event_holds_its_waiters_until_it_is_complete(device: SimulatedDevice) -> None:
    slab = device.memory(SIZE)
    first, second = device.stream(), device.stream()
    device.hold(kernels=True)
    device.kernel(first, writes=[at(slab)], fill=3)
    device.wait(second, device.record(first))
    device.copy(second, slab.ctypes.data + 2048, slab.ctypes.data, 1024)
    after = device.record(second)
    time.sleep(0.01)
    assert not device.query(event=after)
    device.hold()
    device.synchronize(event=after)
    assert np.array_equal(slab[2048:3072], pattern(3, 1024))
    assert device.race_count == 0


def test_order_is_transitive_over_events_and_streams(device: SimulatedDevice) -> None:
    slab = device.memory(SIZE)
    first, second, third = (device.stream() for _ in range(3))
    device.kernel(first, writes=[at(slab)])
    device.wait(second, device.record(first))
    device.wait(third, device.record(second))
    device.kernel(third, reads=[at(slab)])
    assert device.race_count == 0
    device.kernel(first, writes=[at(slab)])  # not behind the reader
    assert device.race_count == 1


def test_copies_of_a_batch_are_not_ordered_among_themselves(device: SimulatedDevice) -> None:
    slab, arena = device.memory(SIZE), device.host(SIZE)
    arena[:] = np.arange(SIZE) % 251
    stream = device.stream()
    d, s = slab.ctypes.data, arena.ctypes.data
    device.copy_batch(stream, [(d, s + 64, 64), (d + 64, s, 64)])
    device.synchronize(stream=stream)
    assert np.array_equal(slab[:128], np.concatenate([arena[64:128], arena[:64]]))
    assert device.race_count == 0
    device.copy_batch(stream, [(d, s, 64), (d + 128, d, 64)])
    assert "race: copies 0 and 1 of a batch" in device.races[0]
    device.synchronize()
    device.kernel(stream, writes=[at(slab)])
    device.copy_batch(stream, [(s, d, 64)])
    assert device.race_count == 1
    device.copy_batch(stream, [(s + 64, d, 64)], any_order=True)  # may read before the kernel
    assert device.race_count == 2
    with pytest.raises(CudaError):
        device.copy_batch(device.LEGACY, [(s, d, 64)])


def test_kernels_report_what_they_read(device: SimulatedDevice) -> None:
    slab = device.memory(SIZE)
    slab[:] = np.random.default_rng(1).integers(256, size=SIZE)
    before = slab.copy()
    stream, base = device.stream(), slab.ctypes.data
    kernel = device.kernel(
        stream, reads=[(base, 3, 4, 10), at(slab, 100, 200)], writes=[(base + 20, 5, 2, 9)], fill=77
    )
    device.synchronize(stream=stream)
    rows = [before[10 * row : 10 * row + 3] for row in range(4)]
    assert device.result(kernel) == checksum(*rows, before[100:200])
    for row in range(2):
        before[20 + 9 * row : 25 + 9 * row] = pattern(77, 5)
    assert np.array_equal(slab, before)


def test_events_measure_time(device: SimulatedDevice) -> None:
    stream = device.stream()
    start, end = device.event(timing=True), device.event(timing=True)
    device.record(stream, start)
    device.synchronize(event=start)
    time.sleep(0.002)
    device.record(stream, end)
    device.synchronize(stream=stream)
    assert 2 <= device.elapsed_ms(start, end) < 60_000
    with pytest.raises(CudaError) as caught:
        device.elapsed_ms(start, device.record(stream))
    assert caught.value.code == 400


def test_unknown_handles_are_refused(device: SimulatedDevice) -> None:
    stream, event = device.stream(), device.event()
    for call, *arguments in (
        ("cudaStreamSynchronize", event),
        ("cudaEventRecord", stream, stream),
        ("cudaStreamWaitEvent", stream, stream, 0),
        ("cudaEventDestroy", stream),
        ("cudaStreamDestroy", 12345),
    ):
        with pytest.raises(CudaError) as caught:
            device._call(str(call), *arguments)
        assert caught.value.code == 400


def test_a_destroyed_stream_completes_its_jobs(device: SimulatedDevice) -> None:
    slab = device.memory(SIZE)
    device.hold(kernels=True)
    handle = ctypes.c_void_p()
    device._call("cudaStreamCreateWithPriority", ctypes.byref(handle), 0, 0)
    assert handle.value is not None
    device.kernel(handle.value, writes=[at(slab)], fill=9)
    device._call("cudaStreamDestroy", handle.value)
    for number in range(100):  # streams that take the places of ended ones
        device.kernel(device.stream(), reads=[at(slab)])
        assert device.race_count == number + 1  # nothing waited for it
    device.hold()
    device.synchronize()
    assert np.array_equal(slab, pattern(9, SIZE))


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_of_a_lane_are_complete_once_their_ticket_is(library: Path, seed: int) -> None:
    with SimulatedDevice(library, seed) as device, TransferEngine() as engine:
        slab, arena = device.memory(SIZE), device.host(SIZE)
        for array in (slab, arena):
            engine.register(array.ctypes.data, SIZE, owner=array)
        forward, lane = device.stream(), engine.cuda_lane(library=library, dispatches=2)
        for step in range(1, 4):
            device.kernel(forward, writes=[at(slab)], fill=step)
            device.synchronize(stream=forward)
            rows = [(slab.ctypes.data + i, arena.ctypes.data + i, 64, 1, 0, 0)
                    for i in range(0, SIZE, 64)]  # fmt: skip
            engine.submit(rows, lane, Priority(step % 3)).wait(60)
            device.host_reads(*at(arena)[:2])
            assert np.array_equal(arena, pattern(step, SIZE))


def test_copies_of_a_lane_that_ignore_a_kernel_are_races(
    device: SimulatedDevice, library: Path
) -> None:
    with TransferEngine() as engine:
        slab, arena = device.memory(SIZE), device.host(SIZE)
        for array in (slab, arena):
            engine.register(array.ctypes.data, SIZE, owner=array)
        lane = engine.cuda_lane(library=library)
        device.kernel(device.stream(), writes=[at(slab)])
        copy = [(slab.ctypes.data, arena.ctypes.data, SIZE, 1, 0, 0)]
        engine.submit(copy, lane).wait(60)
    assert device.race_count == 1
