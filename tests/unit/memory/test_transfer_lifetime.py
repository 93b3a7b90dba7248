"""Tests of the lifetime of the memory, threads and tickets of a transfer engine."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from transfer_kit import DEADLINE_S, KIB, MIB, memory, one, run, wait_until

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import (
    Lane,
    Priority,
    State,
    TransferCancelledError,
    TransferEngine,
)


def test_an_idle_engine_uses_no_cpu_time(engine: TransferEngine, tmp_path: Path) -> None:
    src, dst = memory(engine, 4096, seed=13), memory(engine, 4096)
    host = engine.host_lane(2)
    lanes: list[Lane] = [host, engine.file_lane(tmp_path), engine.throttled_lane(host)]
    for lane in (lanes[0], lanes[2]):
        engine.submit(one(src.ctypes.data, dst.ctypes.data, 4096), lane).wait(DEADLINE_S)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_engine_threads_block_signals(engine: TransferEngine, tmp_path: Path) -> None:
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    host = engine.host_lane(2)
    engine.throttled_lane(host)
    engine.file_lane(tmp_path, backend="threads", depth=4)
    started = set(tasks.iterdir()) - before
    assert len(started) == 2 + 1 + 1 + 4
    for task in started:
        assert (task / "comm").read_text() == "sglx-transfer\n"
        blocked = int((task / "status").read_text().split("SigBlk:")[1].split()[0], 16)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):
            assert blocked >> number - 1 & 1


# Ownership and closing


def test_an_owner_lives_until_its_region_is_unregistered(engine: TransferEngine) -> None:
    class Owner:
        pass

    array, owner = np.zeros(4096, np.uint8), Owner()
    region = engine.register(array.ctypes.data, 4096, owner=owner)
    gone = weakref.ref(owner)
    del owner
    assert gone() is not None
    region.unregister()
    assert gone() is None
    with pytest.raises(ValueError, match="is not registered"):
        region.unregister()


def test_memory_in_use_cannot_be_unregistered(engine: TransferEngine, slow: Lane) -> None:
    array = np.zeros(8192, np.uint8)
    region = engine.register(array.ctypes.data, 8192, owner=array)
    ticket = engine.submit(one(region.address, region.address + 4096, 4096), slow)
    with pytest.raises(ExtError, match=r"is in use by \d unfinished tickets; wait for them"):
        region.unregister()
    ticket.cancel()
    engine.close()
    assert ticket.poll()
    region.unregister()


def test_a_finished_ticket_does_not_prevent_unregistering(
    engine: TransferEngine, host: Lane
) -> None:
    array = np.zeros(8192, np.uint8)
    region = engine.register(array.ctypes.data, 8192, owner=array)
    for _ in range(50):
        ticket = engine.submit(one(region.address, region.address + 4096, 4096), host)
        ticket.wait(DEADLINE_S)
        region.unregister()  # possible at once
        region = engine.register(array.ctypes.data, 8192, owner=array)


def test_close_cancels_queued_copies_and_refuses_new_ones(
    slow: Lane, engine: TransferEngine
) -> None:
    src, dst = memory(engine, MIB, seed=14), memory(engine, MIB)
    queued = [engine.submit(one(src.ctypes.data, dst.ctypes.data, MIB), slow) for _ in range(3)]
    engine.close()
    engine.close()
    assert [ticket.state for ticket in queued] == [State.CANCELLED] * 3
    for refused in (
        lambda: engine.submit(one(src.ctypes.data, dst.ctypes.data, 1), slow),
        lambda: engine.register(1, 1),
        lambda: engine.host_lane(),
    ):
        with pytest.raises(ExtError, match="the transfer engine is closed"):
            refused()
    with pytest.raises(TransferCancelledError):
        queued[0].wait(DEADLINE_S)


def test_a_garbage_collected_engine_closes(tmp_path: Path) -> None:
    before = threads_of_process()
    array = np.zeros(MIB, np.uint8)
    owner = type("Owner", (), {})()
    gone = weakref.ref(owner)
    engine = TransferEngine()
    owner.engine = engine  # a cycle
    engine.register(array.ctypes.data, MIB, owner=owner)
    lane = engine.throttled_lane(engine.host_lane(2), bytes_per_second=100)
    engine.file_lane(tmp_path)
    ticket = engine.submit(one(array.ctypes.data, array.ctypes.data + MIB // 2, 4096), lane)
    assert threads_of_process() > before
    del engine, owner, lane
    gc.collect()
    assert gone() is None
    assert ticket.poll()
    # There are fewer if a thread of another test was about to end.
    assert wait_until(lambda: threads_of_process() <= before)


def threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def test_use_in_a_forked_child_raises_an_error() -> None:
    program = """
import os, numpy as np
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine
engine = TransferEngine()
lane = engine.throttled_lane(engine.host_lane(2), bytes_per_second=100)
a = np.zeros(8192, np.uint8)
region = engine.register(a.ctypes.data, 8192, owner=a)
copies = [(a.ctypes.data, a.ctypes.data + 4096, 4096, 1, 0, 0)]
ticket = engine.submit(copies, lane)
child = os.fork()
if child == 0:
    told = 0
    for use in (lambda: engine.submit(copies, lane), lambda: ticket.wait(600), ticket.cancel,
                region.unregister, lambda: engine.host_lane(1),
                lambda: engine.wait_any([ticket], 600)):
        try:
            use()
        except ExtError as error:
            told += "which forked this one" in str(error)
    print(told, flush=True)
    engine.close()
    with TransferEngine() as own:  # one of its own works
        own.register(a.ctypes.data, 8192, owner=a)
        own.submit(copies, own.host_lane(1)).wait(60)
else:
    assert os.waitpid(child, 0)[1] == 0
    assert not ticket.poll()
"""
    assert run(program).stdout == "6\n"


def test_many_threads_submit_cancel_and_poll(engine: TransferEngine) -> None:
    lane = engine.host_lane(2, piece_bytes=4096)
    src = memory(engine, 256 * KIB, seed=15)
    dst = [memory(engine, 256 * KIB) for _ in range(6)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        rng = np.random.default_rng(index)
        try:
            for turn in range(60):
                at = int(rng.integers(0, 128 * KIB))
                ops = one(src.ctypes.data + at, dst[index].ctypes.data + at, 128 * KIB)
                ticket = engine.submit(ops, lane, Priority(int(rng.integers(0, 3))))
                if turn % 3 == 0:
                    ticket.cancel()
                assert engine.wait_any([ticket], DEADLINE_S) == [ticket]
                if ticket.state == State.DONE:
                    assert ticket.bytes_done == 128 * KIB
                    assert np.array_equal(dst[index][at : at + 128 * KIB], src[at : at + 128 * KIB])
                else:
                    assert ticket.state == State.CANCELLED
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert errors == []
