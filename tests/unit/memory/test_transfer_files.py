"""File lane: reads and writes, priorities, rejected copies, fallbacks and files that end early."""

from __future__ import annotations

import errno
import os
import stat
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import DEADLINE_S, MIB, PAGE, Bytes, pages, run

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import FileLane, Priority, State, TransferEngine, TransferError

BACKENDS = ("io_uring", "threads")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "io_uring":
        with TransferEngine() as engine:
            try:
                engine.file_lane("/tmp", backend="io_uring", direct=False)
            except ExtError as error:
                pytest.skip(str(error))
    return name


def randomize(array: Bytes, seed: int) -> None:
    array[:] = np.random.default_rng(seed).integers(0, 256, array.size, np.uint8)


# Reads and writes


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_written_bytes_are_read_back(
    engine: TransferEngine, tmp_path: Path, backend: str, direct: bool, pinned: bool
) -> None:
    size = 3 * MIB + 5 * PAGE
    lane = engine.file_lane(tmp_path, backend=backend, direct=direct, depth=4)
    out, back = pages(engine, size, pinned=pinned), pages(engine, size, pinned=pinned)
    randomize(out, 1)
    registered = pinned and backend == "io_uring"
    assert lane.registered_bytes in ((2 * size, 0) if registered else (0,))  # 0: memlock limit
    file = lane.open("data", size, writable=True, create=True)
    engine.submit([(out.ctypes.data, file.base, size, 1, 0, 0)], lane).wait(DEADLINE_S)
    assert (tmp_path / "data").read_bytes() == out.tobytes()
    ticket = engine.submit([(file.base, back.ctypes.data, size, 1, 0, 0)], lane)
    ticket.wait(DEADLINE_S)
    assert ticket.bytes_done == size
    assert np.array_equal(out, back)
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o600


def test_random_copies_agree_with_numpy(tmp_path: Path, backend: str) -> None:
    with TransferEngine() as engine:
        content = np.random.default_rng(2).integers(0, 256, 512 * 1024, np.uint8)
        (tmp_path / "data").write_bytes(content.tobytes())
        lane = engine.file_lane(
            tmp_path, backend=backend, direct=False, depth=3, request_bytes=4096
        )
        file = lane.open("data", content.size)
        memory = pages(engine, MIB)

        @settings(max_examples=40, deadline=None)
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            memory[:] = 0
            want = np.zeros_like(memory)
            ops, at = [], 0
            for _ in range(data.draw(st.integers(1, 6))):
                width = data.draw(st.integers(1, 9000))
                height = data.draw(st.integers(1, 8))
                file_pitch = width + data.draw(st.sampled_from([0, 1, 512]))
                pitch = width + data.draw(st.sampled_from([0, 0, 7]))
                offset = data.draw(st.integers(0, content.size - height * file_pitch))
                ops.append(
                    (file.base + offset, memory.ctypes.data + at, width, height, file_pitch, pitch)
                )
                for row in range(height):
                    to, of = at + row * pitch, offset + row * file_pitch
                    want[to : to + width] = content[of : of + width]
                at += height * pitch
            engine.submit(ops, lane).wait(DEADLINE_S)
            assert np.array_equal(memory, want)

        check()


def test_rows_of_blocks_are_gathered_into_a_file(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    lane = engine.file_lane(tmp_path, backend=backend)
    slab = pages(engine, 16 * 3 * PAGE)
    randomize(slab, 3)
    file = lane.open("layer", 16 * PAGE, writable=True, create=True)
    ops = [(slab.ctypes.data + PAGE, file.base, PAGE, 16, 3 * PAGE, PAGE)]
    engine.submit(ops, lane).wait(DEADLINE_S)
    layer = slab.reshape(16, 3, PAGE)[:, 1]
    assert (tmp_path / "layer").read_bytes() == layer.tobytes()


def test_one_batch_copies_to_and_from_many_files(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    lane = engine.file_lane(tmp_path, backend=backend, depth=8)
    memory, back = pages(engine, 64 * PAGE), pages(engine, 64 * PAGE)
    randomize(memory, 4)
    files = [lane.open(f"{i}", PAGE, writable=True, create=True) for i in range(64)]
    write = [
        (memory.ctypes.data + i * PAGE, file.base, PAGE, 1, 0, 0) for i, file in enumerate(files)
    ]
    engine.submit(write, lane).wait(DEADLINE_S)
    read = [(dst, back.ctypes.data + src - memory.ctypes.data, *r) for src, dst, *r in write]
    engine.submit(read, lane).wait(DEADLINE_S)
    assert np.array_equal(memory, back)
    for file in files:
        file.close()
    with pytest.raises(ValueError, match=r"src .* is in no registered region"):
        engine.submit(read, lane)


def test_a_throttled_lane_copies_files(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    lane = engine.file_lane(tmp_path, backend=backend)
    slow = engine.throttled_lane(lane, bytes_per_second=100e6, latency=1e-4)
    memory, back = pages(engine, MIB), pages(engine, MIB)
    randomize(memory, 5)
    file = lane.open("data", MIB, writable=True, create=True)
    engine.submit([(memory.ctypes.data, file.base, MIB, 1, 0, 0)], slow).wait(DEADLINE_S)
    engine.submit([(file.base, back.ctypes.data, MIB, 1, 0, 0)], slow).wait(DEADLINE_S)
    assert np.array_equal(memory, back)
    assert "emulated" in repr(slow)
    assert "FileLane" in repr(slow)


# Priorities


def test_an_urgent_read_overtakes_a_bulk_read(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    inner = engine.file_lane(tmp_path, backend=backend)
    lane = engine.throttled_lane(inner, bytes_per_second=1e5, piece_bytes=PAGE)
    memory = pages(engine, 8 * MIB)
    randomize(memory, 6)
    file = inner.open("data", 8 * MIB, writable=True, create=True)
    engine.submit([(memory.ctypes.data, file.base, 8 * MIB, 1, 0, 0)], inner).wait(DEADLINE_S)
    bulk = engine.submit([(file.base, memory.ctypes.data, 4 * MIB, 1, 0, 0)], lane, Priority.BULK)
    memory[4 * MIB :] = 0
    last = [(file.base + 4 * MIB, memory.ctypes.data + 4 * MIB, PAGE, 1, 0, 0)]
    engine.submit(last, lane, Priority.URGENT).wait(DEADLINE_S)
    assert memory[4 * MIB : 4 * MIB + PAGE].any()
    assert not bulk.poll()


# Rejected copies


def test_direct_io_rejects_unaligned_copies(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    lane = engine.file_lane(tmp_path, backend=backend)
    if not lane.direct:
        pytest.skip(f"{tmp_path} has no direct I/O")
    memory = pages(engine, 4 * PAGE)
    file = lane.open("data", MIB, writable=True, create=True)
    in_memory, in_file = file.alignment
    assert file.alignment == lane.alignment
    assert in_file > 1
    m, f = memory.ctypes.data, file.base
    odd = in_memory // 2
    cases = [
        (
            (m, f, PAGE + 1, 1, 0, 0),
            f"copy 0: width {PAGE + 1} is not a multiple of {in_file}, which",
        ),
        ((m, f + 1, PAGE, 1, 0, 0), f"copy 0: file offset 1 is not a multiple of {in_file}"),
        ((f + 8, m, PAGE, 1, 0, 0), f"copy 0: file offset 8 is not a multiple of {in_file}"),
        ((m, f, PAGE, 2, PAGE, PAGE + 1), "copy 0: pitch in the file 4097 is not a multiple"),
    ]
    if odd:
        cases += [
            ((m + odd, f, PAGE, 1, 0, 0), f"memory address .* is not a multiple of {in_memory}"),
            ((m, f, PAGE, 2, PAGE + odd, PAGE), "copy 0: pitch in memory"),
        ]
    for op, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.submit([op], lane)
    assert (tmp_path / "data").stat().st_size == 0


def test_invalid_copies_files_and_options_are_rejected(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    lane = engine.file_lane(tmp_path, backend=backend)
    other = engine.file_lane(tmp_path, backend=backend)
    memory = pages(engine, 4 * PAGE)
    m = memory.ctypes.data
    file = lane.open("data", MIB, writable=True, create=True)
    reader = lane.open("data", MIB)
    for op, where, message in [
        ((m, m + PAGE, PAGE, 1, 0, 0), lane, "a file lane copies between host memory and a file"),
        ((file.base, file.base + PAGE, PAGE, 1, 0, 0), lane, "between host memory and a file"),
        ((m, file.base, PAGE, 1, 0, 0), other, "was opened by another lane"),
        ((m, file.base, PAGE, 1, 0, 0), engine.host_lane(1), "cannot be accessed by a host lane"),
        ((m, reader.base, PAGE, 1, 0, 0), lane, "dst lies in read-only file region"),
        ((m, file.base + MIB, PAGE, 1, 0, 0), lane, "dst .* is in no registered region"),
        ((m, file.base + MIB - PAGE, 2 * PAGE, 1, 0, 0), lane, "runs past the end of file region"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit([op], where)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fd = os.open(fifo, os.O_RDWR)
    try:
        with pytest.raises(ValueError, match="is neither a regular file nor a device"):
            lane.adopt(fd, PAGE)
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match=f"file descriptor {fd}: Bad file descriptor"):
        lane.adopt(fd, PAGE)
    fd = os.open(tmp_path / "data", os.O_WRONLY)
    try:
        with pytest.raises(ValueError, match="is open for writing only"):
            lane.adopt(fd, PAGE)
    finally:
        os.close(fd)
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_APPEND)
    try:
        with pytest.raises(ValueError, match="is open with O_APPEND: writes would all go to its"):
            lane.adopt(fd, PAGE)
    finally:
        os.close(fd)
    buffered = engine.file_lane(tmp_path, backend=backend, direct=False)
    with pytest.raises(ValueError, match="is neither a regular file nor a device"):
        buffered.open("fifo", PAGE)  # without waiting for a writer
    with pytest.raises(FileNotFoundError):
        lane.open("none", PAGE)
    with pytest.raises(FileNotFoundError):
        engine.file_lane(tmp_path / "none")
    for bad, message in [
        ({"depth": 0}, "queue depth of 0; expected 1 to 4096"),
        ({"bytes_in_flight": 0}, "0 bytes in flight; expected at least 1"),
        ({"request_bytes": 5000}, "requests of 5000 bytes; expected a multiple of 4096"),
        ({"backend": "aio"}, "expected 'auto', 'io_uring' or 'threads'"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.file_lane(tmp_path, **bad)  # type: ignore[arg-type]


# Fallbacks


def test_a_file_system_without_direct_io_is_buffered(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates the refusal: which file systems refuse direct I/O depends on the kernel."""
    real = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    lane = engine.file_lane(tmp_path)
    assert not lane.direct
    assert "direct=False" in repr(lane)
    memory = pages(engine, 2 * PAGE)
    randomize(memory, 7)
    file = lane.open("data", 1000, writable=True, create=True)
    engine.submit([(memory.ctypes.data + 1, file.base + 3, 17, 1, 0, 0)], lane).wait(DEADLINE_S)
    assert (tmp_path / "data").read_bytes() == bytes(3) + memory[1:18].tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]  # no probe is left


@pytest.mark.parametrize(("error", "direct"), [(errno.EINVAL, False), (errno.ENOSPC, True)])
def test_a_file_system_that_refuses_direct_writes_is_buffered(
    engine: TransferEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    direct: bool,
) -> None:
    """A full file system is not one of these: it may have blocks for the files that exist."""
    if not engine.file_lane(tmp_path).direct:
        pytest.skip("no direct I/O here")

    def refuse(*_: object) -> int:
        raise OSError(error, "refused")

    monkeypatch.setattr(os, "write", refuse)
    assert engine.file_lane(tmp_path).direct == engine.disk_lane(tmp_path).direct == direct
    assert list(tmp_path.iterdir()) == []  # no probe is left
    monkeypatch.undo()


def test_a_directory_that_fails_the_test_of_direct_writes_is_refused(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="broken"):
        engine.file_lane(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_files_in_shared_memory_work_with_or_without_direct_io(engine: TransferEngine) -> None:
    directory = Path("/dev/shm")
    if not os.access(directory, os.W_OK):
        pytest.skip("no writable /dev/shm")
    lane = engine.file_lane(directory)
    memory, back = pages(engine, 4 * PAGE), pages(engine, 4 * PAGE)
    randomize(memory, 8)
    name = f"sgl-ext-test-{os.getpid()}"
    try:
        file = lane.open(name, 4 * PAGE, writable=True, create=True)
        engine.submit([(memory.ctypes.data, file.base, 4 * PAGE, 1, 0, 0)], lane).wait(DEADLINE_S)
        engine.submit([(file.base, back.ctypes.data, 4 * PAGE, 1, 0, 0)], lane).wait(DEADLINE_S)
    finally:
        (directory / name).unlink(missing_ok=True)
    assert np.array_equal(memory, back)


WITHOUT_URING = """
import ctypes, struct, sys, warnings
# Seccomp: io_uring_setup (425 on every architecture) is EPERM, as in a container's profile.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
rules = b"".join(struct.pack("HBBI", *rule) for rule in code)
buffer = ctypes.create_string_buffer(rules)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
program = Program(len(code), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine
with TransferEngine() as engine, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lane = engine.file_lane(sys.argv[1])
    print(lane.backend)
    print(caught[0].category.__name__, caught[0].message)
    try:
        engine.file_lane(sys.argv[1], backend="io_uring")
    except ExtError as error:
        print(error)
"""


def test_without_io_uring_the_lane_uses_threads_and_warns(tmp_path: Path) -> None:
    used, warning, refusal = run(WITHOUT_URING, str(tmp_path)).stdout.splitlines()
    assert used == "threads"
    assert warning.startswith(f"RuntimeWarning files in {tmp_path} are read and written by threads")
    assert "io_uring" in warning
    assert "io_uring" in refusal


def test_a_low_limit_on_locked_memory_is_reported(tmp_path: Path) -> None:
    program = """
import os, resource, sys
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
os.setuid(65534)  # root is not bound by the limit
with TransferEngine() as engine:
    try:
        engine.file_lane("/tmp", backend="io_uring", direct=False)
    except ExtError as error:
        print(error)
"""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    said = run(program).stdout
    if "Cannot allocate memory" not in said:
        pytest.skip(f"this kernel does not count the memory of io_uring: {said}")
    assert "limit on locked memory (RLIMIT_MEMLOCK): raise it" in said


def test_an_explicit_backend_does_not_warn(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lane: FileLane = engine.file_lane(tmp_path, backend=backend)
    assert lane.backend == backend
    assert f"backend='{backend}'" in repr(lane)
    assert sorted(tmp_path.iterdir()) == []


# Files that end early


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [0, 1, PAGE, PAGE + 100, 5 * PAGE + 17])
def test_a_file_that_ends_early_fails_with_its_length(
    engine: TransferEngine, tmp_path: Path, backend: str, direct: bool, length: int
) -> None:
    content = np.random.default_rng(9).integers(1, 256, length, np.uint8)
    (tmp_path / "data").write_bytes(content.tobytes())
    lane = engine.file_lane(tmp_path, backend=backend, direct=direct)
    memory = pages(engine, 8 * PAGE)
    file = lane.open("data", 8 * PAGE)
    ticket = engine.submit([(file.base, memory.ctypes.data, 8 * PAGE, 1, 0, 0)], lane)
    expected = rf"copy 0: reading 32768 bytes at offset 0: the file ended after {length} bytes"
    with pytest.raises(TransferError, match=expected) as caught:
        ticket.wait(DEADLINE_S)
    assert ticket.state == State.FAILED
    assert caught.value.bytes_done == ticket.bytes_done == length
    assert np.array_equal(memory[:length], content)


def test_directories_on_one_device_share_its_lane_and_priorities(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    """Reads of one directory overtake those of another one that are queued on the same device."""
    memory = pages(engine, 2 * MIB)
    lanes = []
    for name in ("tiers", "contexts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(name.encode() * (MIB // 8))
        lanes.append(engine.disk_lane(tmp_path / name, backend=backend))
    assert lanes[0]._native is lanes[1]._native
    assert lanes[0]._native is not engine.file_lane(tmp_path, backend=backend)._native
    slow = engine.throttled_lane(lanes[0], bytes_per_second=MIB, depth=1, piece_bytes=4 * PAGE)
    files = [lane.open("data", MIB // 8 * 5) for lane in lanes]
    m = memory.ctypes.data
    bulk = engine.submit([(files[0].base, m, MIB // 2, 1, 0, 0)], slow, Priority.NORMAL)
    urgent = engine.submit([(files[1].base, m + MIB, PAGE, 1, 0, 0)], slow, Priority.URGENT)
    urgent.wait(30)
    assert bulk.state is State.PENDING
    assert bytes(memory[MIB : MIB + 8]) == b"contexts"
    bulk.wait(30)
    assert bytes(memory[:5]) == b"tiers"
