"""Throttled lane: never faster than its limits; urgent copies overtake others."""

from __future__ import annotations

import time

import numpy as np
from transfer_kit import DEADLINE_S, KIB, Op, memory, one, wait_until

from sgl_ext.memory.transfer import (
    Lane,
    Priority,
    TransferEngine,
)


def test_throttled_lane_is_marked_as_emulated_and_limits_its_rates(
    engine: TransferEngine, host: Lane
) -> None:
    src, dst = memory(engine, 64 * KIB, seed=16), memory(engine, 64 * KIB)
    lane = engine.throttled_lane(host, bytes_per_second=1e6, piece_bytes=4096)
    assert lane.emulated
    assert not host.emulated
    assert repr(lane).startswith("ThrottledLane(emulated: 1e+06 bytes/s")
    ops = one(src.ctypes.data, dst.ctypes.data, 64 * KIB)
    # No upper bound on the time: the machine may be arbitrarily slow.
    assert _seconds(engine, lane, ops) >= 64 * KIB / 1e6
    few = engine.throttled_lane(host, operations_per_second=100)
    rows = [(src.ctypes.data + i, dst.ctypes.data + i, 1, 1, 0, 0) for i in range(10)]
    assert _seconds(engine, few, rows) >= 10 / 100 - 1e-3
    late = engine.throttled_lane(host, latency=0.05)
    assert _seconds(engine, late, rows) >= 0.05
    assert np.array_equal(src, dst)


def test_latencies_overlap_and_urgent_copies_overtake_them(
    engine: TransferEngine, host: Lane
) -> None:
    src, dst = memory(engine, 4096, seed=17), memory(engine, 4096)
    lane = engine.throttled_lane(host, latency=3600.0, depth=8)
    rows = [(src.ctypes.data + i, dst.ctypes.data + i, 1, 1, 0, 0) for i in range(100)]
    ticket = engine.submit(rows, lane, Priority.BULK)
    assert wait_until(lambda: bool(dst[:8].all() or np.array_equal(dst[:8], src[:8])))
    urgent = engine.submit(one(src.ctypes.data + 200, dst.ctypes.data + 200, 8), lane, Priority(2))
    # The urgent copy passes although bulk copies fill their depth of eight.
    assert wait_until(lambda: np.array_equal(dst[200:208], src[200:208]))
    assert not ticket.poll()
    assert not urgent.poll()  # its bytes are copied, its emulated end is an hour away
    assert not dst[8:100].any()


def _seconds(engine: TransferEngine, lane: Lane, ops: list[Op]) -> float:
    start = time.monotonic()
    engine.submit(ops, lane).wait(DEADLINE_S)
    return time.monotonic() - start
