"""Transfer engine over memory: copies, validation, order, cancellation and waiting."""

from __future__ import annotations

import ast
import threading
import time

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import DEADLINE_S, KIB, MIB, Op, expected, memory, one, run, wait_until

from sgl_ext._native import _transfer
from sgl_ext.memory.native_ticket import NativeTicket
from sgl_ext.memory.transfer import (
    Lane,
    Priority,
    Region,
    State,
    TransferCancelledError,
    TransferEngine,
    TransferError,
)

# Copies


@st.composite
def batches(draw: st.DrawFn) -> list[Op]:
    """Draws copies by offset: any sources, and successive destinations, some interleaved."""
    ops: list[Op] = []
    dst = 0
    for _ in range(draw(st.integers(0, 8))):
        width = draw(st.integers(1, 600))
        height = draw(st.integers(1, 40))
        src_pitch = width + draw(st.sampled_from([0, 0, 1, 64, 1000]))
        layers = draw(st.integers(1, 3))
        dst_pitch = layers * width + draw(st.integers(0, 5))
        for layer in range(layers):
            src = draw(st.integers(0, 2000))
            ops.append((src, dst + layer * width, width, height, src_pitch, dst_pitch))
        dst += height * dst_pitch + draw(st.integers(0, 10))
    return ops


@pytest.mark.parametrize("kind", ["host", "throttled"])
def test_copies_equal_those_of_numpy(kind: str) -> None:
    with TransferEngine() as engine:
        src, dst = memory(engine, 256 * KIB, seed=1), memory(engine, 1 * MIB)
        lane: Lane = engine.host_lane(2, piece_bytes=4096)
        if kind == "throttled":
            lane = engine.throttled_lane(lane, piece_bytes=4096)

        @settings(max_examples=60, deadline=None)
        @given(ops=batches(), priority=st.sampled_from(Priority))
        def check(ops: list[Op], priority: Priority) -> None:
            dst[:] = 0
            want = expected(ops, src, dst)
            rows = [(src.ctypes.data + s, dst.ctypes.data + d, *rest) for s, d, *rest in ops]
            ticket = engine.submit(rows, lane, priority)
            ticket.wait(DEADLINE_S)
            assert np.array_equal(dst, want)
            assert ticket.state == State.DONE
            assert ticket.bytes_done == ticket.bytes_total == sum(w * h for _, _, w, h, *_ in ops)

        check()


@pytest.mark.parametrize("size", [1, 65535, 5 * MIB + 321])
@pytest.mark.parametrize("offset", [0, 1, 63])
def test_large_copies_are_exact_at_any_alignment(
    engine: TransferEngine, size: int, offset: int
) -> None:
    src, dst = memory(engine, size + 64, seed=2), memory(engine, size + 130)
    lane = engine.host_lane(2)
    engine.submit(one(src.ctypes.data + offset, dst.ctypes.data + 65, size), lane).wait(DEADLINE_S)
    assert np.array_equal(dst[65 : 65 + size], src[offset : offset + size])
    assert not dst[:65].any()
    assert not dst[65 + size :].any()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32])
def test_batches_may_have_any_integer_dtype_and_layout(
    engine: TransferEngine, host: Lane, dtype: type
) -> None:
    src, dst = memory(engine, 8 * KIB, seed=3), memory(engine, 8 * KIB)
    if dtype is np.int32:  # addresses do not fit
        with pytest.raises(ValueError, match="is in no registered region"):
            engine.submit(np.ones((1, 6), dtype), host)
        return
    rows = [(src.ctypes.data + i, dst.ctypes.data + i, 1, 1, 1, 1) for i in range(0, 8192, 2)]
    batch = np.asfortranarray(np.array(rows, dtype))
    engine.submit(batch, host).wait(DEADLINE_S)
    assert np.array_equal(dst[::2], src[::2])
    assert not dst[1::2].any()


def test_an_empty_batch_is_done(engine: TransferEngine, host: Lane) -> None:
    ticket = engine.submit([], host)
    ticket.wait(DEADLINE_S)
    assert ticket.state == State.DONE
    assert ticket.bytes_total == 0


# Validation


@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    pitches=st.sampled_from([(16,), (7,), (16, 24)]),
    count=st.integers(1, 4),
)
def test_overlapping_copies_are_detected_exactly(
    data: st.DataObject, pitches: list[int], count: int
) -> None:
    """Compares the check for overlaps with the sets of bytes that the copies touch."""
    with TransferEngine() as engine:
        lane = engine.host_lane(1)
        array = memory(engine, 600)
        ops, read, written = [], [], []
        for _ in range(count):
            width = data.draw(st.integers(1, min(pitches)))
            height = data.draw(st.integers(1, 4))
            sides = [data.draw(st.sampled_from(pitches)) for _ in range(2)]
            firsts = [data.draw(st.integers(0, 600 - height * max(sides))) for _ in range(2)]
            src, dst = (array.ctypes.data + first for first in firsts)
            ops.append((src, dst, width, height, *sides))
            touched = [
                {first + row * pitch + i for row in range(height) for i in range(width)}
                for first, pitch in zip(firsts, sides, strict=True)
            ]
            read.append(touched[0])
            written.append(touched[1])
        clash = any(a & b for a in written for b in read) or any(
            written[i] & written[j] for i in range(count) for j in range(i)
        )
        if clash:
            with pytest.raises(ValueError, match=r"copy \d: its destination overlaps the .* run"):
                engine.submit(ops, lane)
        else:
            engine.submit(ops, lane).wait(DEADLINE_S)


def test_interleaved_layers_of_the_same_blocks_do_not_overlap(
    engine: TransferEngine, host: Lane
) -> None:
    layers, tokens, row = 30, 64, 48
    token = layers * row
    src, dst = memory(engine, tokens * token, seed=4), memory(engine, tokens * token)
    ops = [
        (src.ctypes.data + layer * row, dst.ctypes.data + layer * row, row, tokens, token, token)
        for layer in range(layers)
    ]
    engine.submit(ops, host).wait(DEADLINE_S)
    assert np.array_equal(src, dst)
    ops[7] = (ops[7][0], ops[7][1] + 1, *ops[7][2:])  # reaches into layer 8
    with pytest.raises(ValueError, match="overlaps the destination of copy"):
        engine.submit(ops, host)


def test_refusals_name_the_copy_and_change_nothing(engine: TransferEngine, host: Lane) -> None:
    src, dst = memory(engine, 4096, seed=5), memory(engine, 4096)
    read_only = np.zeros(4096, np.uint8)
    engine.register(read_only.ctypes.data, 4096, writable=False)
    device = engine.register(1 << 40, 4096, device=True)
    s, d = src.ctypes.data, dst.ctypes.data
    good = (s, d, 16, 1, 0, 0)
    cases: list[tuple[tuple[int, ...], str]] = [
        ((s, d + 64, 0, 1, 0, 0), "copy 1: width 0, height 1; expected both to be at least 1"),
        ((s, d + 64, 8, -3, 8, 8), "copy 1: width 8, height -3"),
        ((s, d + 64, 100, 2, 64, 100), "copy 1: width 100 exceeds src_pitch 64"),
        ((s, d + 64, 100, 2, 100, 99), "copy 1: width 100 exceeds dst_pitch 99"),
        ((s, d + 64, 100, 2, 100, -100), "copy 1: width 100 exceeds dst_pitch -100"),
        ((1, d + 64, 8, 1, 0, 0), "copy 1: src 0x1, width 8, .* is in no registered region"),
        (
            (s, d + 4090, 8, 1, 0, 0),
            r"copy 1: dst .* runs past the end of memory region \d+ \(4096",
        ),
        ((s, d + 64, 8, 600, 8, 8), "copy 1: src .* height 600, pitch 8 runs past the end"),
        ((s, d + 64, 2**62, 2**62, 2**62, 2**62), "copy 1: src .* runs past|no registered"),
        ((s, read_only.ctypes.data, 8, 1, 0, 0), "copy 1: dst lies in read-only memory region"),
        ((s, device.address, 8, 1, 0, 0), "copy 1: device memory region .* a host lane"),
        ((s, d + 8, 8, 1, 0, 0), "copy 0: its destination overlaps the destination of copy 1"),
        ((d, s + 512, 8, 1, 0, 0), "copy 0: its destination overlaps the source of copy 1"),
        ((s + 512, s + 516, 8, 1, 0, 0), "copy 1: its destination overlaps the source of copy 1"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.submit([good, bad], host)
    assert not dst.any()
    assert not read_only.any()


def test_malformed_arguments_are_refused(engine: TransferEngine, host: Lane) -> None:
    array = memory(engine, 16)
    for copies in ([[1, 2, 3]], [1, 2, 3, 4, 5, 6], np.ones((2, 6))):
        with pytest.raises(ValueError, match=r"expected integers \[n, 6\]"):
            engine.submit(copies, host)
    with pytest.raises(ValueError, match="priority 3; expected 0 to 2"):
        engine.submit([], host, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 threads; expected 1"):
        engine.host_lane(0)
    with pytest.raises(ValueError, match="pieces of 1 bytes; expected at least 4096"):
        engine.host_lane(1, piece_bytes=1)
    with pytest.raises(ValueError, match="a timeout of -1"):
        engine.submit([], host).wait(-1)
    slow = engine.throttled_lane(host, latency=3600.0)
    pending = engine.submit(one(array.ctypes.data, array.ctypes.data + 8, 8), slow)
    with TransferEngine() as other:
        for foreign in (
            lambda: other.submit([], host),
            lambda: other.throttled_lane(host),
            lambda: other.wait_any([pending], DEADLINE_S),
        ):
            with pytest.raises(ValueError, match="host lane belongs to another engine"):
                foreign()
    for rate in (0.0, float("nan")):
        with pytest.raises(ValueError, match="expected at least 1 byte/s"):
            engine.throttled_lane(host, bytes_per_second=rate)


def test_overlapping_and_invalid_regions_are_refused(engine: TransferEngine) -> None:
    array = memory(engine, 4096)
    base = array.ctypes.data
    for address, length in ((base + 4095, 1), (base - 1, 2), (base - 10, 9000), (base + 1, 8)):
        with pytest.raises(ValueError, match="overlap memory region"):
            engine.register(address, length)
    engine.register(base + 4096, 1)
    for address, length in ((0, 8), (-8, 8), (1 << 62, 8), (8, 2**62)):
        with pytest.raises(ValueError, match="there is no memory at"):
            engine.register(address, length)
    with pytest.raises(ValueError, match="a region of 0 bytes"):
        engine.register(base, 0)


# Order, priority and cancellation


@pytest.mark.parametrize("levels", [(0, 1), (0, 2), (1, 2)])
def test_a_ticket_of_higher_priority_overtakes(
    engine: TransferEngine, levels: tuple[int, int]
) -> None:
    src, dst = memory(engine, 4 * MIB, seed=6), memory(engine, 4 * MIB)
    # A piece takes 41 ms: the bulk copy 42 s, the urgent copy the time of a few pieces.
    lane = engine.throttled_lane(engine.host_lane(1), bytes_per_second=1e5, piece_bytes=4096)
    low, high = map(Priority, levels)
    bulk = [engine.submit(one(src.ctypes.data, dst.ctypes.data, 4 * MIB - 4096), lane, low)]
    bulk += [engine.submit([], lane, low)]
    at = 4 * MIB - 4096
    urgent = engine.submit(one(src.ctypes.data + at, dst.ctypes.data + at, 4096), lane, high)
    urgent.wait(DEADLINE_S)
    assert urgent.priority == high
    assert np.array_equal(dst[at:], src[at:])
    assert not any(ticket.poll() for ticket in bulk)
    assert bulk[0].bytes_done < bulk[0].bytes_total // 2


def test_tickets_of_one_priority_finish_in_order(engine: TransferEngine) -> None:
    src, dst = memory(engine, 2 * MIB, seed=7), memory(engine, 2 * MIB)
    lane = engine.host_lane(2, piece_bytes=4096)
    tickets = []
    for i in range(400):
        size = 1 + i * 997 % 5000
        at = i * 5000
        tickets.append(engine.submit(one(src.ctypes.data + at, dst.ctypes.data + at, size), lane))
    while not tickets[-1].poll():
        # Polled from the last to the first: all tickets before a finished one are finished.
        states = [ticket.poll() for ticket in reversed(tickets)][::-1]
        if True in states:
            last = len(states) - 1 - states[::-1].index(True)
            assert all(states[:last])
    assert all(ticket.state == State.DONE for ticket in tickets)


def test_cancel_keeps_the_bytes_copied_so_far(engine: TransferEngine) -> None:
    src, dst = memory(engine, MIB, seed=8), memory(engine, MIB)
    lane = engine.throttled_lane(engine.host_lane(1), bytes_per_second=1e5, piece_bytes=4096)
    first = engine.submit(one(src.ctypes.data, dst.ctypes.data, MIB), lane)
    second = engine.submit(one(src.ctypes.data, dst.ctypes.data, MIB), lane)
    while first.bytes_done == 0:
        time.sleep(0.001)
    assert second.cancel()  # it had not started, so it does not wait for the first
    assert second.state == State.CANCELLED
    assert second.bytes_done == 0
    assert first.cancel()
    with pytest.raises(TransferCancelledError, match=r"cancelled after \d+ of 1048576 bytes"):
        first.wait(DEADLINE_S)
    assert 0 < first.bytes_done < MIB
    assert first.bytes_done % 4096 == 0
    done = first.bytes_done
    assert np.array_equal(dst[:done], src[:done])
    assert not dst[done:].any()
    assert not first.cancel()


def test_cancel_of_a_finished_ticket_returns_false(engine: TransferEngine, host: Lane) -> None:
    src, dst = memory(engine, 4096, seed=9), memory(engine, 4096)
    ticket = engine.submit(one(src.ctypes.data, dst.ctypes.data, 4096), host)
    ticket.wait(DEADLINE_S)
    assert not ticket.cancel()
    assert ticket.state == State.DONE
    assert repr(ticket) == "Ticket(DONE, NORMAL, 4096 of 4096 bytes)"


# Waiting


def test_a_wait_times_out_and_the_ticket_continues(engine: TransferEngine, slow: Lane) -> None:
    src, dst = memory(engine, 64 * KIB, seed=10), memory(engine, 64 * KIB)
    ticket = engine.submit(one(src.ctypes.data, dst.ctypes.data, 64 * KIB), slow)
    with pytest.raises(TimeoutError, match=r"0 of 65536 bytes were transferred in 0.01 s"):
        ticket.wait(0.01)
    assert ticket.state == State.PENDING
    assert engine.wait_any([ticket], 0.01) == []


def test_wait_any_returns_the_finished_tickets(
    engine: TransferEngine, slow: Lane, host: Lane
) -> None:
    src, dst = memory(engine, 64 * KIB, seed=11), memory(engine, 64 * KIB)
    stuck = engine.submit(one(src.ctypes.data, dst.ctypes.data, 4096), slow)
    others = [
        engine.submit(one(src.ctypes.data, dst.ctypes.data + i * 4096, 4096), host)
        for i in range(1, 9)
    ]
    pending = [stuck, *others]
    while len(pending) > 1:
        finished = engine.wait_any(pending, DEADLINE_S)
        assert finished
        pending = [ticket for ticket in pending if ticket not in finished]
    assert pending == [stuck]
    assert engine.wait_any([], DEADLINE_S) == []


def test_a_wait_releases_the_gil(engine: TransferEngine, slow: Lane) -> None:
    src, dst = memory(engine, 4096, seed=12), memory(engine, 4096)
    ticket = engine.submit(one(src.ctypes.data, dst.ctypes.data, 4096), slow)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            ticket.wait(DEADLINE_S)
        except TransferCancelledError as error:
            caught.append(error)
        except TransferError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert wait_until(lambda: not _transfer.no_waits())
    engine.close()  # runs only if the wait does not hold the GIL
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert _transfer.no_waits()


def test_an_interrupt_ends_a_wait() -> None:
    program = """
import os, signal, threading, numpy as np
from sgl_ext.memory.transfer import TransferEngine
engine = TransferEngine()
lane = engine.throttled_lane(engine.host_lane(1), bytes_per_second=1)
a = np.zeros(8192, np.uint8)
engine.register(a.ctypes.data, 8192, owner=a)
ticket = engine.submit([(a.ctypes.data, a.ctypes.data + 4096, 4096, 1, 0, 0)], lane)
# A shell that starts the tests in the background has them ignore the interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    ticket.wait(600)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(program).stdout == "interrupted\n"


# The stub


def test_stub_declares_exactly_the_names_of_the_module() -> None:
    stub = ast.parse((ROOT / "sgl_ext" / "_native" / "_transfer.pyi").read_text())
    names = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert names == {name for name in dir(_transfer) if not name.startswith("_")}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            found = {name for name in dir(getattr(_transfer, node.name)) if name[0] != "_"}
            declared = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            inherited = {
                name for base in getattr(_transfer, node.name).__mro__[1:-1] for name in dir(base)
            }
            assert declared - {"__init__"} == found - inherited, node.name


def test_handles_are_typed(engine: TransferEngine, host: Lane) -> None:
    array = np.zeros(1, np.uint8)
    region = engine.register(array.ctypes.data, 1, owner=array)
    assert isinstance(region, Region)
    assert isinstance(engine.submit([], host), NativeTicket)
    assert repr(host) == "HostLane(threads=2)"
