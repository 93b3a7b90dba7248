"""CUDA lane over a fake CUDA runtime that holds, counts and fails copies on request."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transfer_kit import DEADLINE_S, KIB, MIB, expected, fake_cudart, memory, one, wait_until

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import (
    Priority,
    State,
    TransferEngine,
    TransferError,
)


@pytest.fixture(scope="module")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cudart(tmp_path_factory.mktemp("cuda"))


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
    assert fake.fake_events() == 0


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
