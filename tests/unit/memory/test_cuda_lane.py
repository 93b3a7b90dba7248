"""CUDA lane over a fake CUDA runtime that holds, counts and fails copies on request."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from simulated_device import SimulatedDevice, at, checksum, pattern
from transfer_kit import (
    DEADLINE_S,
    KIB,
    MIB,
    PAGE,
    expected,
    fake_cuda,
    memory,
    one,
    pages,
    wait_until,
)

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import (
    CudaLane,
    Priority,
    State,
    TransferCancelledError,
    TransferEngine,
    TransferError,
)


@pytest.fixture(scope="module")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(cudart: Path) -> Iterator[ctypes.CDLL]:
    fake = ctypes.CDLL(str(cudart))
    fake.fake_executed.restype = ctypes.c_void_p
    yield fake
    fake.fake_hold(0)


def test_cuda_lane_copies_pitched_and_contiguous_rows(
    engine: TransferEngine, cudart: Path, fake: ctypes.CDLL
) -> None:
    src, dst = memory(engine, MIB, seed=18), memory(engine, MIB)
    lane = engine.cuda_lane(library=cudart, group_bytes=64 * KIB)
    assert lane.library == str(cudart)
    s, d = src.ctypes.data, dst.ctypes.data
    ops = [
        (s, d, 100, 50, 300, 200),
        (s, d + 100, 100, 50, 200, 200),
        (s, d + MIB // 2, MIB // 2, 1, 0, 0),
    ]
    ticket = engine.submit(ops, lane)
    ticket.wait(DEADLINE_S)
    offsets = [(a - s, b - d, *rest) for a, b, *rest in ops]
    assert np.array_equal(dst, expected(offsets, src, np.zeros_like(dst)))
    # The thread that has published the ticket frees its events.
    assert wait_until(lambda: fake.fake_events() == 0)


ROWS = [(64 * row, 32 * row, 32, 1, 0, 0) for row in range(20)]
MIXED = [*ROWS, (2048, 2048, 16, 8, 64, 32), (3000, 3000, 1000, 1, 0, 0)]


def moved(engine: TransferEngine, lane: CudaLane) -> None:
    """Copies :data:`MIXED` and checks the bytes."""
    src, dst = memory(engine, 4096, seed=23), memory(engine, 4096)
    s, d = src.ctypes.data, dst.ctypes.data
    engine.submit([(s + a, d + b, *rest) for a, b, *rest in MIXED], lane).wait(DEADLINE_S)
    assert np.array_equal(dst, expected(MIXED, src, np.zeros_like(dst)))


@pytest.mark.parametrize(
    ("version", "batched"),
    [(12060, 0), (12080, len(ROWS) + 1), (12090, 21), (13000, 21), (13020, 21), (14000, 0)],
)
def test_single_rows_are_copied_in_one_call_where_the_runtime_has_it(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice, version: int, batched: int
) -> None:
    """The call has other arguments in CUDA 12 than in CUDA 13, and is not known of CUDA 14."""
    number = ctypes.c_int.in_dll(device.fake, "fake_version")
    before, number.value = number.value, version
    try:
        moved(engine, engine.cuda_lane(library=cudart, dispatches=32))
    finally:
        number.value = before
    assert device.fake.fake_batched_copies() == batched


def test_no_batch_names_host_memory_by_addresses_that_the_device_does_not_use(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    usable = ctypes.c_int.in_dll(device.fake, "fake_host_pointers")
    usable.value = 0
    try:
        moved(engine, engine.cuda_lane(library=cudart, dispatches=32))
    finally:
        usable.value = 1
    assert device.fake.fake_batched_copies() == 0


@pytest.mark.parametrize("error", [1, 36, 801])
def test_copies_go_one_by_one_after_a_batch_was_refused(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice, error: int
) -> None:
    lane = engine.cuda_lane(library=cudart, dispatches=32)
    device.fake.fake_fail_copy(1, error)  # the batch comes after the copy with several rows
    for _ in range(2):
        moved(engine, lane)
        assert device.fake.fake_batched_copies() == 0
    assert device.fake.cudaGetLastError() == 0


def test_an_error_of_a_batch_fails_its_ticket(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    lane = engine.cuda_lane(library=cudart, dispatches=32)
    src, dst = memory(engine, 4096, seed=23), memory(engine, 4096)
    s, d = src.ctypes.data, dst.ctypes.data
    device.fake.fake_fail_copy(1, 700)
    ticket = engine.submit([(s + 2048, d + 2048, 16, 8, 64, 32), (s, d, 8, 1, 0, 0),
                            (s + 8, d + 8, 8, 1, 0, 0)], lane)  # fmt: skip
    with pytest.raises(TransferError, match="an illegal memory access") as caught:
        ticket.wait(DEADLINE_S)
    assert (caught.value.op, caught.value.bytes_done) == (1, 128)
    moved(engine, lane)
    assert device.fake.fake_batched_copies() == 21


def test_cuda_bulk_copies_in_flight_are_bounded_and_overtaken(
    engine: TransferEngine, cudart: Path, fake: ctypes.CDLL
) -> None:
    src, dst = memory(engine, 4096, seed=19), memory(engine, 4096)
    lane = engine.cuda_lane(library=cudart, dispatches=4)
    fake.fake_hold(1)
    before = fake.fake_executed_count()
    rows = [(src.ctypes.data + i, dst.ctypes.data + i, 1, 1, 0, 0) for i in range(1000)]
    bulk = engine.submit(rows, lane, Priority.BULK)
    assert wait_until(lambda: fake.fake_outstanding() == 8)  # at most two groups of four
    urgent_at = dst.ctypes.data + 2000
    urgent = engine.submit(one(src.ctypes.data, urgent_at, 8), lane, Priority.URGENT)
    assert wait_until(lambda: fake.fake_outstanding() == 9)
    assert not bulk.poll()
    fake.fake_hold(0)
    urgent.wait(DEADLINE_S)
    bulk.wait(DEADLINE_S)
    order = [fake.fake_executed(i) for i in range(before, fake.fake_executed_count())]
    assert order.index(urgent_at) == 0  # not behind the 1,000 bulk copies
    assert fake.fake_most_outstanding() <= 9


@pytest.mark.parametrize("where", ["copy", "event", "record"])
def test_cuda_errors_fail_their_ticket_only(
    engine: TransferEngine, cudart: Path, fake: ctypes.CDLL, where: str
) -> None:
    src, dst = memory(engine, 4096, seed=20), memory(engine, 4096)
    lane = engine.cuda_lane(library=cudart, dispatches=1)
    if where == "copy":
        fake.fake_fail_copy(2, 700)
    elif where == "event":
        fake.fake_fail_event(700)
    else:
        fake.fake_fail_record(700)
    rows = [(src.ctypes.data + i, dst.ctypes.data + i, 1, 1, 0, 0) for i in range(8)]
    failed = engine.submit(rows, lane)
    with pytest.raises(TransferError, match="an illegal memory access was encountered") as caught:
        failed.wait(DEADLINE_S)
    assert caught.value.errno == 700
    assert caught.value.op == (2 if where == "copy" else 0)
    engine.submit(rows, lane).wait(DEADLINE_S)  # the next ticket is not affected
    assert np.array_equal(src[:8], dst[:8])


def test_cuda_close_waits_for_dispatched_and_cancels_other_copies(
    cudart: Path, fake: ctypes.CDLL
) -> None:
    with TransferEngine() as engine:
        src, dst = memory(engine, 4096, seed=21), memory(engine, 4096)
        lane = engine.cuda_lane(library=cudart, dispatches=2)
        fake.fake_hold(1)
        rows = [(src.ctypes.data + i, dst.ctypes.data + i, 1, 1, 0, 0) for i in range(100)]
        ticket = engine.submit(rows, lane)
        assert wait_until(lambda: fake.fake_outstanding() == 4)
        with pytest.raises(TimeoutError, match=r"still in flight after 0.05 s; close again"):
            engine.close(0.05)
        assert not ticket.poll()
        fake.fake_hold(0)
    assert ticket.state == State.CANCELLED
    assert 0 < ticket.bytes_done < 100
    assert fake.fake_streams() == 0


def test_missing_cuda_runtime_or_device_is_named_in_the_error(
    engine: TransferEngine, cudart: Path
) -> None:
    with pytest.raises(ExtError, match=r"no CUDA runtime could be opened \(.*nowhere.so"):
        engine.cuda_lane(library="/nowhere.so")
    with pytest.raises(ExtError, match=r"libm.so.6 is not a CUDA runtime: it lacks cudaGetDevice"):
        engine.cuda_lane(library="libm.so.6")
    with pytest.raises(ExtError, match=r"there is no CUDA device 7; .* finds 1"):
        engine.cuda_lane(7, library=cudart)


@pytest.fixture
def device(cudart: Path) -> Iterator[SimulatedDevice]:
    with SimulatedDevice(cudart) as device:
        yield device


def test_copies_wait_for_streams_and_a_fenced_stream_for_copies(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    src, dst = pages(engine, PAGE), pages(engine, PAGE)
    lane = engine.cuda_lane(library=cudart)
    writer, other, reader = device.stream(), device.stream(), device.stream()
    device.hold(copies=True, kernels=True)
    device.kernel(writer, writes=[at(src, 0, 8)], fill=5)
    device.kernel(other, writes=[at(src, 8)], fill=6)
    copies = one(src.ctypes.data, dst.ctypes.data, PAGE)
    ticket = engine.submit(copies, lane, after=[writer, other])
    ticket.fence(reader, DEADLINE_S)  # while nothing has been copied
    assert not ticket.poll()
    kernel = device.kernel(reader, [at(dst)])
    device.hold()
    device.synchronize(stream=reader)
    assert device.result(kernel) == checksum(pattern(5, 8), pattern(6, PAGE - 8))
    ticket.wait(DEADLINE_S)


def test_without_a_fence_or_streams_to_wait_for_there_is_a_race(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    src, dst = pages(engine, PAGE), pages(engine, PAGE)
    lane, stream = engine.cuda_lane(library=cudart), device.stream()
    device.hold(copies=True, kernels=True)
    device.kernel(stream, writes=[at(src)], fill=5)
    ticket = engine.submit(one(src.ctypes.data, dst.ctypes.data, PAGE), lane)
    assert wait_until(lambda: device.race_count == 1)
    device.kernel(stream, [at(dst)])
    assert device.race_count == 2
    device.hold()
    ticket.wait(DEADLINE_S)
    device.reset()


def test_fence_dispatches_more_than_is_in_flight_otherwise(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    src, dst = pages(engine, 8 * PAGE), pages(engine, 8 * PAGE)
    lane, stream = engine.cuda_lane(library=cudart, dispatches=1), device.stream()
    device.hold(copies=True)
    rows = [(src.ctypes.data + i, dst.ctypes.data + i, 8, 1, 0, 0) for i in range(0, 256, 8)]
    ticket = engine.submit(rows, lane, Priority.BULK)
    assert wait_until(lambda: device.fake.fake_outstanding() == 2)
    ticket.fence(stream, DEADLINE_S)
    assert device.fake.fake_outstanding() == 32
    device.hold()
    ticket.wait(DEADLINE_S)


def test_fence_without_a_stream_waits_on_the_host(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    src, dst = pages(engine, PAGE), pages(engine, PAGE)
    lane = engine.cuda_lane(library=cudart)
    device.hold(copies=True)
    ticket = engine.submit(one(src.ctypes.data, dst.ctypes.data, PAGE), lane)
    with pytest.raises(TimeoutError, match=r"0 of 4096 bytes were transferred in 0\.\d+ s"):
        ticket.fence(None, 0.05)
    device.hold()
    ticket.fence(None, DEADLINE_S)
    assert ticket.state == State.DONE


def test_fence_of_a_ticket_without_copies_waits_for_earlier_ones(
    engine: TransferEngine, cudart: Path, fake: ctypes.CDLL
) -> None:
    src, dst = memory(engine, PAGE, seed=3), memory(engine, PAGE)
    lane = engine.cuda_lane(library=cudart)
    fake.fake_hold(1)
    engine.submit([(src.ctypes.data, dst.ctypes.data, PAGE, 1, 0, 0)], lane)
    empty = engine.submit(np.empty((0, 6), np.int64), lane)
    with pytest.raises(TimeoutError):
        empty.fence(0, 0.05)
    fake.fake_hold(0)
    empty.fence(0, DEADLINE_S)
    assert empty.state == State.DONE


def test_fence_of_a_finished_cancelled_or_failed_ticket_reports_it(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    src, dst = pages(engine, PAGE), pages(engine, PAGE)
    lane, stream = engine.cuda_lane(library=cudart, dispatches=1), device.stream()
    rows = [(src.ctypes.data + i, dst.ctypes.data + i, 8, 1, 0, 0) for i in range(0, 256, 8)]
    done = engine.submit(rows, lane)
    done.wait(DEADLINE_S)
    done.fence(stream, 0.0)
    device.hold(copies=True)
    cancelled = engine.submit(rows, lane)
    assert cancelled.cancel()
    device.hold()
    with pytest.raises(TransferCancelledError):
        cancelled.fence(stream, DEADLINE_S)
    device.fake.fake_fail_copy(0, 700)
    failed = engine.submit(rows, lane)
    with pytest.raises(TransferError, match="an illegal memory access was encountered"):
        failed.fence(stream, DEADLINE_S)


def test_a_failed_record_of_a_stream_refuses_the_batch(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    src, dst = pages(engine, PAGE), pages(engine, PAGE)
    lane, stream = engine.cuda_lane(library=cudart), device.stream()
    copies = one(src.ctypes.data, dst.ctypes.data, PAGE)
    device.fake.fake_fail_record(700)
    with pytest.raises(ExtError, match="an event could not be recorded on a CUDA stream"):
        engine.submit(copies, lane, after=[stream])
    engine.submit(copies, lane, after=[stream]).wait(DEADLINE_S)
    # The thread that has published the ticket frees its events.
    assert wait_until(lambda: device.fake.fake_events() == 0)


def test_lanes_without_streams_refuse_to_wait_for_them(engine: TransferEngine) -> None:
    src, dst = memory(engine, PAGE, seed=22), memory(engine, PAGE)
    lane = engine.host_lane()
    copies = one(src.ctypes.data, dst.ctypes.data, PAGE)
    with pytest.raises(ValueError, match="cannot wait for CUDA streams"):
        engine.submit(copies, lane, after=[1])
    engine.submit(copies, lane).fence(1, DEADLINE_S)  # waits on the host
    assert np.array_equal(src, dst)


def test_pinned_memory_is_registered_with_the_runtime_while_it_is_a_region(
    cudart: Path, device: SimulatedDevice
) -> None:
    with TransferEngine() as engine:
        before = pages(engine, 2 * PAGE, pinned=True)
        assert device.registered_bytes == 0  # no lane needs it yet
        lane = engine.cuda_lane(library=cudart)
        after = pages(engine, PAGE, pinned=True)
        assert device.registered_bytes == 3 * PAGE
        engine.submit(one(before.ctypes.data, after.ctypes.data, PAGE), lane).wait(DEADLINE_S)
        assert device.pageable_copies == 0
        pageable = pages(engine, PAGE)
        engine.submit(one(pageable.ctypes.data, after.ctypes.data, PAGE), lane).wait(DEADLINE_S)
        assert device.pageable_copies == 1
        pool = device.memory(PAGE)
        region = engine.register(pool.ctypes.data, PAGE, owner=pool, pinned=True, device=True)
        assert device.registered_bytes == 3 * PAGE  # memory of a device is not pinned
        region.unregister()
    assert device.registered_bytes == 0


def test_memory_that_the_runtime_cannot_pin_is_refused(
    engine: TransferEngine, cudart: Path, device: SimulatedDevice
) -> None:
    before = pages(engine, PAGE, pinned=True)
    refusal = "the CUDA runtime cannot pin 4096 bytes of host memory: out of memory"
    device.fake.fake_fail_register(2)
    with pytest.raises(ExtError, match=refusal):
        engine.cuda_lane(library=cudart)
    assert (device.registered_bytes, device.fake.fake_streams()) == (0, 0)
    lane = engine.cuda_lane(library=cudart)
    memory = np.zeros(2 * PAGE, np.uint8)
    address = -(-memory.ctypes.data // PAGE) * PAGE
    device.fake.fake_fail_register(2)
    with pytest.raises(ExtError, match=f"{refusal}.*ulimit -l"):
        engine.register(address, PAGE, owner=memory, pinned=True)
    assert device.registered_bytes == PAGE
    with pytest.raises(ValueError, match="is in no registered region"):
        engine.submit(one(before.ctypes.data, address, PAGE), lane)
    engine.register(address, PAGE, owner=memory, pinned=True)
    engine.submit(one(before.ctypes.data, address, PAGE), lane).wait(DEADLINE_S)
