"""Device memory that one process lends to another: handed over, replaced, kept, freed.

The driver is that of the simulated CUDA device, whose memory several processes can map.
"""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from simulated_device import SimulatedDevice
from simulated_streams import SimulatedStreams
from transfer_kit import MIB, fake_cuda, wait_until

from sgl_ext.memory import descriptors
from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory
from sgl_ext.memory.descriptors import DescriptorServer, received
from sgl_ext.memory.device_lent import DeviceLendable, map_device_memory
from sgl_ext.memory.lent import Extent, LentMemoryError
from sgl_ext.memory.streams import Streams

PIECE = 4 * MIB
PIECES = 6
DEADLINE_S = 1.0


def view(mapping: CudaMapping) -> NDArray[np.uint8]:
    raw = (ctypes.c_uint8 * mapping.size).from_address(mapping.address)
    return np.frombuffer(raw, np.uint8)


class Owner:
    """Owner of pieces, of which all but the first can be lent; each byte is its piece's number."""

    def __init__(self, library: str, streams: Streams | None = None, pieces: int = PIECES) -> None:
        self.mapping = CudaMapping(0, pieces * PIECE, library=library)
        for at in range(0, pieces * PIECE, PIECE):
            self.mapping.put(at, CudaMemory.create(0, PIECE, library=library))
        self.bytes = view(self.mapping)
        self.bytes.reshape(pieces, PIECE)[:] = np.arange(pieces)[:, None]
        # As the own blocks of a slab, the memory ends within the last piece.
        self.lendable = DeviceLendable(
            self.mapping, 1, pieces * PIECE - 5, streams or Streams(), self.zero
        )
        self.address = f"sgl_ext-test-{secrets.token_hex(8)}"
        self.server = DescriptorServer(self.address, self.lendable.descriptor, deadline=DEADLINE_S)

    def zero(self, offset: int, size: int) -> None:
        self.bytes[offset : offset + size] = 0

    def pieces(self) -> list[int]:
        return self.bytes[::PIECE].tolist()

    def offer(self) -> str:
        """Returns what a borrower needs to know, as JSON."""
        return msgspec.json.encode((self.address, self.lendable.extents)).decode()

    def close(self) -> None:
        """Closes the server and frees the memory, though pytest may keep this object."""
        self.server.close()
        vars(self).clear()


class Borrower:
    """Addresses for the memory of an owner, and a piece of own memory before it."""

    def __init__(self, library: str) -> None:
        self.mapping = CudaMapping(0, 80 * PIECE, library=library)
        self.mapping.put(0, CudaMemory.create(0, PIECE, library=library))
        self.bytes = view(self.mapping)[PIECE:]
        self.extents: tuple[Extent, ...] = ()

    def map(self, offer: str) -> None:
        address, self.extents = msgspec.json.decode(offer, type=tuple[str, tuple[Extent, ...]])
        map_device_memory(self.mapping, PIECE, address, self.extents, deadline=5)

    def unmap(self) -> None:
        self.mapping.drop(PIECE, len(self.extents) * PIECE)

    def pieces(self) -> list[int]:
        return self.bytes[: len(self.extents) * PIECE : PIECE].tolist()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_cuda(tmp_path_factory.mktemp("driver")))


def counts(fake: ctypes.CDLL) -> tuple[int, int, int]:
    """Returns how many handles, mapped pieces and reserved ranges the driver has."""
    gc.collect()
    return fake.fake_handles(), fake.fake_mapped(), fake.fake_reserved()


def held() -> set[object]:
    """Returns the open files and the threads of this process.

    Objects of earlier tests may still close theirs, so only what is added counts as a leak.
    """
    found = set[object](threading.enumerate())
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since, as the folder's own
            found.add((file, file.readlink()))
    return found


@pytest.fixture
def fake(library: str) -> Iterator[ctypes.CDLL]:
    fake = ctypes.CDLL(library)
    assert counts(fake) == (0, 0, 0)
    before = held()
    yield fake
    assert counts(fake) == (0, 0, 0)
    assert held() <= before


@pytest.fixture
def owner(library: str, fake: ctypes.CDLL) -> Iterator[Owner]:
    owner = Owner(library)
    yield owner
    owner.close()


@pytest.fixture
def borrower(library: str, fake: ctypes.CDLL) -> Iterator[Borrower]:
    borrower = Borrower(library)
    yield borrower
    vars(borrower).clear()


PROGRAM = """
import ctypes, sys
sys.path[:0] = {paths!r}
from test_device_lent import *
me = {role}({library!r})
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Other:
    """Another process with an owner or a borrower, ``me``, which evaluates expressions."""

    def __init__(self, role: str, library: str) -> None:
        here = Path(__file__).parent
        paths = [str(here), str(here.parent), str(here.parents[1])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(paths=paths, role=role, library=library)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def begin(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def __call__(self, expression: str) -> str:
        self.begin(expression)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def other(library: str, fake: ctypes.CDLL) -> Iterator[Callable[[str], Other]]:
    """Yields a function that starts another process with a role."""
    started: list[Other] = []

    def start(role: str) -> Other:
        started.append(Other(role, library))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        assert process.process.stdin is not None
        assert process.process.stdout is not None
        process.process.stdin.close()
        process.process.stdout.close()


def test_whole_pieces_are_lendable(owner: Owner, library: str) -> None:
    lendable = owner.lendable
    assert (lendable.size, lendable.end) == (5 * PIECE, 6 * PIECE)
    assert [(e.fd, e.offset, e.size) for e in lendable.extents] == [
        (number, 0, PIECE) for number in range(5)
    ]
    assert len({extent.name for extent in lendable.extents}) == 5
    options = Streams(), owner.zero
    for start, size in ((0, 6), (PIECE, 5), (PIECE + 1, 4), (5 * PIECE + 1, 0), (9 * PIECE, 0)):
        other = DeviceLendable(owner.mapping, start, 6 * PIECE, *options)
        assert (other.size, other.end) == (size * PIECE, 6 * PIECE)
    owner.mapping.drop(5 * PIECE, PIECE)
    owner.mapping.put(5 * PIECE, CudaMemory.create(0, PIECE // 2, library=library))
    with pytest.raises(ValueError, match=r"one size, found \[2097152, 4194304\]"):
        DeviceLendable(owner.mapping, 0, 6 * PIECE, *options)


def test_replaced_memory_stays_with_a_living_borrower(
    owner: Owner, library: str, fake: ctypes.CDLL, other: Callable[[str], Other]
) -> None:
    there = other("Borrower")
    assert there(f"me.map({owner.offer()!r})") == "None"
    assert there("me.pieces()") == "[1, 2, 3, 4, 5]"
    assert there("me.bytes.__setitem__(2 * PIECE, 30)") == "None"
    assert owner.pieces() == [0, 1, 2, 30, 4, 5]
    late = owner.offer()
    owner.lendable.replace(PIECE + 1)
    assert owner.pieces() == [0, 1, 2, 30, 0, 0]
    assert owner.bytes[4 * PIECE :].max() == 0
    assert (owner.lendable.size, owner.lendable.retired) == (5 * PIECE, 2 * PIECE)
    assert there("me.bytes.__setitem__(4 * PIECE, 60)") == "None"  # in a piece that was replaced
    assert there("me.bytes.__setitem__(0, 10)") == "None"
    assert owner.pieces() == [0, 10, 2, 30, 0, 0]
    owner.bytes[5 * PIECE] = 99
    assert there("me.pieces()") == "[10, 2, 30, 4, 60]"
    assert counts(fake) == (8, 6, 1)
    owner.lendable.discard()
    assert owner.lendable.retired == 0
    assert counts(fake) == (6, 6, 1)
    assert there("me.pieces()") == "[10, 2, 30, 4, 60]"
    # What was replaced is lent no more; the pieces in its place are.
    assert there("me.unmap()") == "None"
    with pytest.raises(LentMemoryError, match=r"4,194,304 B of .* not or no longer lent; ask for"):
        Borrower(library).map(late)
    assert there(f"me.map({owner.offer()!r})") == "None"
    assert there("me.pieces()") == "[10, 2, 30, 0, 99]"
    assert there("(me.unmap(), me.mapping.pieces.keys())[1]") == "dict_keys([0])"


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (1, 1), (5, 1), (1, 5), (9, 9)])
def test_memory_can_be_replaced_repeatedly(
    owner: Owner, borrower: Borrower, fake: ctypes.CDLL, sizes: tuple[int, ...]
) -> None:
    names: set[str] = {extent.name for extent in owner.lendable.extents}
    for pieces in sizes:
        owner.bytes[PIECE:] = 5
        new = min(pieces, PIECES - 1)
        owner.lendable.replace(pieces * PIECE)
        assert owner.pieces() == [0, *[5] * (PIECES - 1 - new), *[0] * new]
        fresh = {extent.name for extent in owner.lendable.extents[-new:]}
        assert len(fresh) == new
        assert not fresh & names
        names |= fresh
        borrower.map(owner.offer())
        assert borrower.pieces() == owner.pieces()[1:]
        borrower.unmap()
    owner.lendable.replace(0)
    assert owner.lendable.retired == sum(min(pieces, PIECES - 1) for pieces in sizes) * PIECE
    owner.lendable.discard()
    assert counts(fake) == (PIECES + 1, PIECES + 1, 2)


def test_failed_replacement_changes_nothing(owner: Owner, fake: ctypes.CDLL) -> None:
    extents, pieces = owner.lendable.extents, owner.pieces()
    free = ctypes.c_size_t.in_dll(fake, "fake_free_bytes")
    free.value, before = 0, free.value
    try:
        with pytest.raises(LentMemoryError, match=r"cannot be replaced: .* allocate 4,194,304 B"):
            owner.lendable.replace(2 * PIECE)
    finally:
        free.value = before
    assert (owner.lendable.extents, owner.pieces()) == (extents, pieces)


def test_pieces_can_be_handed_over_while_they_are_replaced(
    owner: Owner, library: str, fake: ctypes.CDLL
) -> None:
    done = threading.Event()
    failures: list[BaseException] = []
    mapped = 0

    def borrow() -> None:
        nonlocal mapped
        borrower = Borrower(library)
        while not done.is_set():
            try:
                borrower.map(owner.offer())
            except LentMemoryError as error:
                if "no longer lent" not in str(error):
                    failures.append(error)
                continue
            mapped += 1
            borrower.unmap()

    thread = threading.Thread(target=borrow)
    thread.start()
    for number in count():
        assert thread.is_alive()
        if number >= 60 and mapped:
            break
        owner.lendable.replace((1 + number % 5) * PIECE)
        if number % 3 == 0:
            owner.lendable.discard()
    done.set()
    thread.join()
    owner.lendable.discard()
    assert not failures
    assert counts(fake) == (PIECES, PIECES, 1)


@pytest.mark.parametrize("failing", range(3))
def test_replacement_that_cannot_be_mapped_is_undone(
    owner: Owner, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    extents, pieces = owner.lendable.extents, owner.pieces()
    real, calls = CudaMapping.put, []

    def put(mapping: CudaMapping, at: int, memory: CudaMemory) -> None:
        calls.append(at)
        if len(calls) == failing + 1:
            mapping.drop(at, memory.size)
            fake.fake_fail(1)
        real(mapping, at, memory)

    with monkeypatch.context() as patch:
        patch.setattr(CudaMapping, "put", put)
        with pytest.raises(LentMemoryError, match=r"cannot be replaced: .* map 4,194,304 B"):
            owner.lendable.replace(3 * PIECE)
    assert (owner.lendable.extents, owner.lendable.retired) == (extents, 0)
    assert owner.pieces() == pieces
    assert counts(fake) == (PIECES, PIECES, 1)


@pytest.mark.parametrize(
    "when", ["mapped", "while it writes", "while it asks", "while it is answered"]
)
def test_owner_reclaims_from_a_borrower_that_was_killed(
    owner: Owner, borrower: Borrower, fake: ctypes.CDLL, other: Callable[[str], Other], when: str
) -> None:
    there = other("Borrower")
    files = psutil.Process().num_fds()
    if when in ("mapped", "while it writes"):
        assert there(f"me.map({owner.offer()!r})") == "None"
        assert there("me.bytes[: 5 * PIECE].fill(7)") == "None"
        if when == "while it writes":
            there.begin("[me.bytes[: 5 * PIECE].fill(8) for _ in range(10**6)]")
            assert wait_until(lambda: owner.pieces() == [0, *[8] * 5])
    else:
        connect = "globals().update(c=socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))"
        assert there(connect) == "None"
        assert there(f"c.connect('\\0' + {owner.address!r})") == "None"
    if when == "while it is answered":  # the answer waits in the socket with its descriptors
        request = msgspec.msgpack.encode(owner.lendable.extents)
        assert int(there(f"c.send({request!r})")) == len(request)
    there.kill()
    borrower.map(owner.offer())  # another one is served
    left = {"mapped": [7] * 5, "while it writes": [8] * 5}.get(when, [1, 2, 3, 4, 5])
    assert borrower.pieces() == left
    borrower.unmap()
    owner.lendable.replace(5 * PIECE)
    owner.lendable.discard()
    assert owner.pieces() == [0] * 6
    assert counts(fake) == (PIECES + 1, PIECES + 1, 2)
    assert wait_until(lambda: psutil.Process().num_fds() == files, 5)


def test_mapped_memory_outlives_its_owner(
    borrower: Borrower, fake: ctypes.CDLL, other: Callable[[str], Other]
) -> None:
    there = other("Owner")
    offer = there("me.offer()")
    borrower.map(offer)
    borrower.bytes[0] = 77
    assert there("me.pieces()") == "[0, 77, 2, 3, 4, 5]"
    there.kill()
    assert borrower.pieces() == [77, 2, 3, 4, 5]
    borrower.bytes[PIECE] = 78
    assert borrower.pieces() == [77, 78, 3, 4, 5]
    borrower.unmap()
    with pytest.raises(LentMemoryError, match="refused; check whether its process has ended"):
        borrower.map(offer)
    assert counts(fake) == (1, 1, 1)


def test_a_stopped_owner_is_not_waited_for(
    borrower: Borrower, fake: ctypes.CDLL, other: Callable[[str], Other]
) -> None:
    there = other("Owner")
    address, extents = msgspec.json.decode(there("me.offer()"), type=tuple[str, tuple[Extent, ...]])
    there.process.send_signal(signal.SIGSTOP)
    os.waitpid(there.process.pid, os.WUNTRACED)  # until all its threads have stopped
    begin = time.monotonic()
    with pytest.raises(LentMemoryError, match=r"no answer within 0\.2 s; check whether"):
        map_device_memory(borrower.mapping, PIECE, address, extents, deadline=0.2)
    assert time.monotonic() - begin < 2
    assert counts(fake) == (1, 1, 1)


def test_many_pieces_are_handed_over_in_batches(library: str, fake: ctypes.CDLL) -> None:
    owner, borrower = Owner(library, pieces=71), Borrower(library)
    files = psutil.Process().num_fds()
    borrower.map(owner.offer())
    assert borrower.pieces() == [*range(1, 71)]
    # Only the imported handles stay open.
    assert wait_until(lambda: psutil.Process().num_fds() == files + 70, 5)
    owner.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "another"}, "not or no longer lent"),
        ({"fd": 17}, "not or no longer lent"),
        ({"size": 2 * PIECE}, "not or no longer lent"),
        ({"offset": 4096}, "a part of a piece .* use the same size of pieces on both sides"),
        ({"name": "n" * (1 << 20)}, "Message too long"),
    ],
)
def test_extents_that_are_not_lent_are_refused(
    owner: Owner, borrower: Borrower, fake: ctypes.CDLL, change: dict[str, object], reason: str
) -> None:
    first, second, *_ = owner.lendable.extents
    wrong = msgspec.structs.replace(second, **change)
    before = psutil.Process().num_fds()
    with pytest.raises(LentMemoryError, match=reason):
        borrower.map(msgspec.json.encode((owner.address, (first, wrong))).decode())
    assert counts(fake) == (PIECES + 1, PIECES + 1, 2)
    assert wait_until(lambda: psutil.Process().num_fds() == before, 5)


@pytest.mark.parametrize("pieces", [1, 66])
def test_nothing_stays_mapped_after_an_error(
    library: str, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    owner, borrower = Owner(library, pieces=71), Borrower(library)
    before, files = counts(fake), psutil.Process().num_fds()
    real = CudaMemory.map_at
    calls: list[int] = []

    def map_at(memory: CudaMemory, address: int) -> None:
        calls.append(address)
        if len(calls) == pieces:
            fake.fake_fail(2)
        real(memory, address)

    with monkeypatch.context() as patch:
        patch.setattr(CudaMemory, "map_at", map_at)
        with pytest.raises(LentMemoryError, match=r"cannot be mapped: .* map 4,194,304 B"):
            borrower.map(owner.offer())
    assert counts(fake) == before
    assert wait_until(lambda: psutil.Process().num_fds() == files, 5)
    for address in ("a" * 200, f"{owner.address}-none"):
        with pytest.raises(LentMemoryError, match=r"(too long|refused); check whether"):
            borrower.map(msgspec.json.encode((address, owner.lendable.extents)).decode())
    map_too_far = 78 * PIECE
    with pytest.raises(LentMemoryError, match="outside the mapping"):
        map_device_memory(borrower.mapping, map_too_far, owner.address, owner.lendable.extents[:3])
    assert counts(fake) == before
    owner.close()


def connect(owner: Owner) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(10)
    channel.connect("\0" + owner.address)
    return channel


@pytest.mark.parametrize(
    "data",
    [
        msgspec.msgpack.encode([Extent("", 0, 0, 1)] * 65),
        b"garbage",
        b"\xc1",
        b"\x91" * 60_000,
        b"\x91\x94\xa2\xff\xff\x00\x00\x00",
        b"\x80",
    ],
)
def test_garbage_ends_the_connection(owner: Owner, borrower: Borrower, data: bytes) -> None:
    files = psutil.Process().num_fds()
    with connect(owner) as channel:
        socket.send_fds(channel, [data], [0, 1])  # nor does the server take descriptors
        with pytest.raises((ConnectionResetError, EOFError)):
            if not channel.recv(100):
                raise EOFError
    assert wait_until(lambda: psutil.Process().num_fds() == files, 5)
    borrower.map(owner.offer())


def test_silent_clients_delay_others_by_their_deadline_only(
    owner: Owner, borrower: Borrower
) -> None:
    files = psutil.Process().num_fds()
    begin = time.monotonic()
    with connect(owner), connect(owner):
        borrower.map(owner.offer())
        assert time.monotonic() - begin < 2 * DEADLINE_S + 3
    assert borrower.pieces() == [1, 2, 3, 4, 5]
    borrower.unmap()
    assert wait_until(lambda: psutil.Process().num_fds() == files, 5)


def test_a_server_closes_although_a_client_goes_on_asking(owner: Owner) -> None:
    request = msgspec.msgpack.encode(owner.lendable.extents[:1])
    with connect(owner) as channel:

        def ask() -> None:
            with suppress(OSError):
                while True:
                    channel.send(request)
                    data, descriptors, *_ = socket.recv_fds(channel, 100, 1)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    if not data:
                        return

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        closing = threading.Thread(target=owner.server.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        asking.join(10)
        assert not asking.is_alive()


@pytest.mark.parametrize("refuses", ["owner", "borrower"])
def test_processes_of_other_users_are_refused(
    owner: Owner, borrower: Borrower, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    thread, real = owner.server._thread, descriptors._user_of

    def user_of(channel: socket.socket) -> int:
        is_owner = threading.current_thread() is thread
        return real(channel) + (is_owner == (refuses == "owner"))

    with monkeypatch.context() as patch:
        patch.setattr(descriptors, "_user_of", user_of)
        reason = f"belongs to user {os.getuid() + 1}, not to user {os.getuid()}; run both"
        closed = "owner closed the connection|Broken pipe|reset by peer"
        with pytest.raises(LentMemoryError, match=reason if refuses == "borrower" else closed):
            borrower.map(owner.offer())
    borrower.map(owner.offer())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_receives_nothing(owner: Owner) -> None:
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            next(received(owner.address, owner.lendable.extents))
        except LentMemoryError as error:
            os._exit(7 if "belongs to user 0" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    ("data", "fds", "reason"),
    [
        (b"garbage", 0, "invalid answer"),
        (msgspec.msgpack.encode({}), 1, "found 1 descriptors, expected 5"),
        (msgspec.msgpack.encode({}), 90, r"found \d+ descriptors, expected 5"),
        (msgspec.msgpack.encode({"error": "no"}), 5, "no$"),
        (msgspec.msgpack.encode({}), 5, "as memory"),  # descriptors of something else
        (b"", 0, "owner closed the connection"),
    ],
)
def test_false_answers_are_refused(
    owner: Owner, borrower: Borrower, fake: ctypes.CDLL, data: bytes, fds: int, reason: str
) -> None:
    address = f"sgl_ext-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen()
        before = psutil.Process().num_fds()

        def answer() -> None:
            channel, _ = listener.accept()
            with channel, open(os.devnull) as file:  # noqa: PTH123
                channel.recv(1 << 16)
                if data:
                    socket.send_fds(channel, [data], [file.fileno()] * fds)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LentMemoryError, match=reason):
            borrower.map(msgspec.json.encode((address, owner.lendable.extents)).decode())
        thread.join()
        assert psutil.Process().num_fds() == before
    assert counts(fake) == (PIECES + 1, PIECES + 1, 2)


def test_an_address_belongs_to_one_server(owner: Owner) -> None:
    with pytest.raises(LentMemoryError, match=f"{owner.address}.*in use"):
        DescriptorServer(owner.address, owner.lendable.descriptor)


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_replaced_when_the_device_has_ended_its_work(library: str, waits: bool) -> None:
    with SimulatedDevice(Path(library)) as device:
        streams = SimulatedStreams(device)
        owner = Owner(library, streams if waits else Streams())

        def zero(offset: int, size: int) -> None:
            device.kernel(streams.schedule, writes=[(owner.mapping.address + offset, size)])

        owner.lendable._zero = zero
        lent = owner.mapping.address + 4 * PIECE
        streams.hold()
        device.kernel(streams.forward, reads=[(lent, 64)])
        owner.lendable.replace(2 * PIECE)
        if not waits:
            streams.release()
        device.kernel(streams.forward, reads=[(lent, 64)])
        if waits:
            device.synchronize()
            assert owner.pieces() == [0, 1, 2, 3, 0, 0]
        else:
            unmapped, unordered = device.races
            assert unmapped.startswith("unmapped: the host unmaps 4194304 bytes")
            assert "not ordered after" in unordered
            device.reset()
        owner.close()
