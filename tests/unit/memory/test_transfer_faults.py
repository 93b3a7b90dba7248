"""Tests of transfer faults: an error fails only its ticket, and processes end without hanging."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from transfer_kit import DEADLINE_S, MIB, PAGE, pages

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import FileLane, State, TransferEngine, TransferError


@pytest.fixture(params=["io_uring", "threads"])
def lane(engine: TransferEngine, tmp_path: Path, request: pytest.FixtureRequest) -> FileLane:
    try:
        return engine.file_lane(tmp_path, backend=request.param, depth=4)
    except ExtError as error:
        pytest.skip(str(error))


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


# Kernel errors


def test_eio_fails_only_its_own_ticket(
    engine: TransferEngine, lane: FileLane, tmp_path: Path
) -> None:
    """Reads from ``/proc/self/mem`` at an offset where nothing is mapped."""
    memory = pages(engine, 4 * PAGE)
    (tmp_path / "data").write_bytes(bytes([7]) * PAGE)
    good = lane.open("data", PAGE)
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        bad = lane.adopt(fd, 4 * PAGE)
    finally:
        os.close(fd)
    healthy = [(good.base, memory.ctypes.data, PAGE, 1, 0, 0)]
    before = engine.submit(healthy, lane)
    failing = engine.submit([(bad.base, memory.ctypes.data + 2 * PAGE, PAGE, 1, 0, 0)], lane)
    after = engine.submit([(good.base, memory.ctypes.data + PAGE, PAGE, 1, 0, 0)], lane)
    for ticket in (before, after):
        ticket.wait(DEADLINE_S)
    with pytest.raises(TransferError, match="Input/output error after 0 bytes") as caught:
        failing.wait(DEADLINE_S)
    assert caught.value.errno == errno.EIO
    assert failing.state == State.FAILED
    assert failing.bytes_done == 0
    assert (memory[: 2 * PAGE] == 7).all()


def test_the_error_names_the_failed_copy_of_a_batch(
    engine: TransferEngine, lane: FileLane, tmp_path: Path
) -> None:
    memory = pages(engine, 16 * PAGE)
    (tmp_path / "data").write_bytes(bytes([7]) * 5 * PAGE)
    file = lane.open("data", 16 * PAGE)
    ops = [(file.base + i * PAGE, memory.ctypes.data + i * PAGE, PAGE, 1, 0, 0) for i in range(6)]
    ticket = engine.submit(ops, lane)
    with pytest.raises(TransferError, match="copy 5: reading 4096 bytes at offset 20480") as caught:
        ticket.wait(DEADLINE_S)
    assert caught.value.op == 5
    assert caught.value.errno == errno.ENODATA
    assert ticket.bytes_done == 5 * PAGE
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert str(copy) == str(caught.value)
    assert (copy.errno, copy.op, copy.bytes_done) == (errno.ENODATA, 5, 5 * PAGE)


def test_a_write_to_a_full_device_fails_with_enospc(engine: TransferEngine, lane: FileLane) -> None:
    memory = pages(engine, PAGE)
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        file = lane.adopt(fd, PAGE)
    finally:
        os.close(fd)
    ticket = engine.submit([(memory.ctypes.data, file.base, PAGE, 1, 0, 0)], lane)
    with pytest.raises(TransferError, match="No space left on device after 0 bytes") as caught:
        ticket.wait(DEADLINE_S)
    assert caught.value.errno == errno.ENOSPC
    # /dev/full can be read, and returns zeros.
    memory[:] = 1
    engine.submit([(file.base, memory.ctypes.data, PAGE, 1, 0, 0)], lane).wait(DEADLINE_S)
    assert not memory.any()


def test_a_full_file_system_keeps_the_bytes_that_fit(
    engine: TransferEngine, tmp_path: Path, lane: FileLane
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        memory = pages(engine, 4 * MIB)
        memory[:] = 5
        there = engine.file_lane(small, backend=lane.backend, request_bytes=64 << 10)
        file = there.open("data", 4 * MIB, writable=True, create=True)
        ticket = engine.submit([(memory.ctypes.data, file.base, 4 * MIB, 1, 0, 0)], there)
        with pytest.raises(TransferError, match="No space left on device") as caught:
            ticket.wait(DEADLINE_S)
        assert caught.value.errno == errno.ENOSPC
        assert 0 < ticket.bytes_done <= MIB
        other = lane.open("elsewhere", PAGE, writable=True, create=True)
        engine.submit([(memory.ctypes.data, other.base, PAGE, 1, 0, 0)], lane).wait(DEADLINE_S)
        file.close()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_write_past_the_file_size_limit_fails_after_a_short_write(
    engine: TransferEngine, lane: FileLane, tmp_path: Path
) -> None:
    memory = pages(engine, 16 * PAGE)
    memory[:] = 3
    file = lane.open("data", 16 * PAGE, writable=True, create=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * PAGE, hard))
    try:
        ticket = engine.submit([(memory.ctypes.data, file.base, 16 * PAGE, 1, 0, 0)], lane)
        with pytest.raises(TransferError, match="File too large after 20480 bytes") as caught:
            ticket.wait(DEADLINE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.bytes_done == 5 * PAGE
    assert (tmp_path / "data").read_bytes() == bytes([3]) * 5 * PAGE


def test_a_copy_from_unmapped_memory_fails_with_efault(
    engine: TransferEngine, lane: FileLane
) -> None:
    """Unmaps registered memory, which callers must not do: the result is an error, not a signal."""
    mapping = mmap.mmap(-1, PAGE)
    array = np.frombuffer(mapping, np.uint8)
    address = array.ctypes.data
    del array
    mapping.close()
    engine.register(address, PAGE)
    file = lane.open("data", PAGE, writable=True, create=True)
    ticket = engine.submit([(address, file.base, PAGE, 1, 0, 0)], lane)
    with pytest.raises(TransferError) as caught:
        ticket.wait(DEADLINE_S)
    assert caught.value.errno == errno.EFAULT


def test_adopt_without_free_descriptors_raises_os_error(lane: FileLane, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"")
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # not later, when it would close descriptors below the limit
    free = os.dup(fd)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    gc.disable()
    try:
        with pytest.raises(OSError, match=f"file descriptor {fd}: Too many open") as caught:
            lane.adopt(fd, PAGE)
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(fd)
    assert caught.value.errno == errno.EMFILE


# Ends of processes

WRITER = """
import mmap, sys, numpy as np
from sgl_ext.memory.transfer import TransferEngine
engine = TransferEngine()
disk = engine.file_lane(sys.argv[1], backend=sys.argv[2])
lane = engine.throttled_lane(disk, bytes_per_second=20e6, piece_bytes=4096)
mapping = mmap.mmap(-1, 64 << 20)
memory = np.frombuffer(mapping, np.uint8)
memory[:] = 9
engine.register(memory.ctypes.data, 64 << 20, owner=mapping)
file = disk.open("data", 64 << 20, writable=True, create=True)
ticket = engine.submit([(memory.ctypes.data, file.base, 64 << 20, 1, 0, 0)], lane)
while ticket.bytes_done < 1 << 20:
    pass
print("writing", flush=True)
"""


def test_the_data_of_a_killed_writer_is_readable(
    engine: TransferEngine, lane: FileLane, tmp_path: Path
) -> None:
    program = WRITER + "ticket.wait(600)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), lane.backend],
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
        assert writer.wait(DEADLINE_S) == -signal.SIGKILL
    size = (tmp_path / "data").stat().st_size
    assert MIB <= size < 64 * MIB
    memory = pages(engine, size // PAGE * PAGE)
    file = lane.open("data", memory.size, writable=True)
    engine.submit([(file.base, memory.ctypes.data, memory.size, 1, 0, 0)], lane).wait(DEADLINE_S)
    assert (memory[:MIB] == 9).all()
    assert set(np.unique(memory)) <= {0, 9}
    engine.submit([(memory.ctypes.data, file.base, PAGE, 1, 0, 0)], lane).wait(DEADLINE_S)


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del engine", "raise SystemExit", "thread"])
def test_a_process_ends_with_copies_in_flight(lane: FileLane, tmp_path: Path, end: str) -> None:
    if end == "thread":
        # The threads' waits end with the engine, when the interpreter exits.
        end = """
import threading
def wait():
    try:
        ticket.wait(600)
    except Exception:
        pass
for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
"""
    result = subprocess.run(
        [sys.executable, "-c", WRITER + end, str(tmp_path), lane.backend],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_process_ends_with_host_copies_in_flight() -> None:
    program = """
import numpy as np
from sgl_ext.memory.transfer import TransferEngine
engine = TransferEngine()
lane = engine.host_lane(2)
a = np.zeros(256 << 20, np.uint8)
engine.register(a.ctypes.data, a.size, owner=a)
half = a.size // 2
tickets = [engine.submit([(a.ctypes.data, a.ctypes.data + half, half, 1, 0, 0)], lane)
           for _ in range(500)]
del a
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


# Leaks


def test_closed_engines_leave_no_descriptors_or_threads(tmp_path: Path) -> None:
    def use(backend: str) -> None:
        with TransferEngine() as engine:
            lane = engine.file_lane(tmp_path, backend=backend)
            memory = pages(engine, PAGE)
            file = lane.open("data", PAGE, writable=True, create=True)
            write = [(memory.ctypes.data, file.base, PAGE, 1, 0, 0)]
            engine.submit(write, lane).wait(DEADLINE_S)
            kept = lane.open("data", PAGE)  # the engine closes it
            assert kept.length == PAGE
            file.close()

    for backend in ("threads", "auto"):
        use(backend)
    gc.collect()
    fds, threads = open_fds(), threading.active_count()
    for _ in range(5):
        for backend in ("threads", "auto"):
            use(backend)
    gc.collect()
    assert open_fds() == fds
    assert threading.active_count() == threads


def test_a_closed_file_frees_its_descriptor_at_once(engine: TransferEngine, lane: FileLane) -> None:
    before = open_fds()
    memory = pages(engine, PAGE)
    for i in range(20):
        file = lane.open(f"{i}", PAGE, writable=True, create=True)
        write = [(memory.ctypes.data, file.base, PAGE, 1, 0, 0)]
        ticket = engine.submit(write, lane)
        ticket.wait(DEADLINE_S)
        file.close()
        assert open_fds() == before


def test_failed_opens_leave_no_descriptors(
    engine: TransferEngine, lane: FileLane, tmp_path: Path
) -> None:
    before = open_fds()
    (tmp_path / "data").write_bytes(b"")
    for length in (0, -5, 1 << 62):
        with pytest.raises(ValueError, match="bytes"):
            lane.open("data", length)
    assert open_fds() == before


def test_memory_does_not_grow(engine: TransferEngine, lane: FileLane) -> None:
    memory = pages(engine, 4096 * 64)
    host = engine.host_lane(1)
    file = lane.open("data", 64 * PAGE, writable=True, create=True)
    rows = np.array(
        [(memory.ctypes.data + i, memory.ctypes.data + PAGE + i, 1, 1, 0, 0) for i in range(4000)]
    )
    write = [(memory.ctypes.data, file.base, PAGE, 1, 0, 0)]

    def turn() -> None:
        for _ in range(50):
            engine.submit(rows, host).wait(DEADLINE_S)
            engine.submit(write, lane).wait(DEADLINE_S)

    turn()
    before = _resident()
    for _ in range(4):
        turn()
    # A batch of 4,000 copies has 192 kB, so 200 leaked batches would have 38 MB.
    assert _resident() - before < 8 * MIB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
