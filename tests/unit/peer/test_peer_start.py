"""Tests of errors that prevent lending: refused starts, and messages that are refused."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import zmq
from conftest import until
from msgspec.structs import replace
from scheduler_kit import Scheduler

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import dispatch, planning, runtime
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.cpu.attention import CpuAttnBackend
from sgl_ext.peer import directory
from sgl_ext.peer import link as peer_link
from sgl_ext.peer.directory import DirectoryError
from sgl_ext.peer.link import Link, LinkError
from sgl_ext.peer.loan import Borrower, Lender
from sgl_ext.peer.messages import Refusal, RefusedError, decode, encode

LEND = Lender(b"worker", os.getpid(), ()).message
KEEP = Borrower(b"master", os.getpid(), 1, LEND).message


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "peers"
    path.mkdir(mode=0o700)
    return path


def test_a_directory_is_created_with_mode_700(tmp_path: Path) -> None:
    assert directory.address(tmp_path / "a" / "b") == f"ipc://{tmp_path}/a/b/master"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a directory to another user")
def test_a_directory_of_another_user_is_refused(private: Path) -> None:
    os.chown(private, 4321, -1)
    with pytest.raises(
        DirectoryError, match="belongs to user 4321, but this process runs as user 0"
    ):
        directory.address(private)


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702])
def test_a_directory_accessible_to_other_users_is_refused(private: Path, mode: int) -> None:
    private.chmod(mode)
    with pytest.raises(DirectoryError, match=f"has mode {mode:04o}, .* run chmod 700 on it"):
        directory.address(private)


def test_a_directory_that_cannot_be_created_is_refused(private: Path) -> None:
    with pytest.raises(DirectoryError, match="is too long for a socket"):
        directory.address(private / ("d" * 100))
    with pytest.raises(DirectoryError, match="cannot be created: File name too long"):
        directory.address(private / ("d" * 300))
    (private / "file").touch()
    with pytest.raises(DirectoryError, match="cannot be created: Not a directory"):
        directory.address(private / "file" / "peers")


def test_a_second_master_of_a_directory_is_refused(private: Path) -> None:
    already = rf"already has a master \(process {os.getpid()}\)"
    with directory.lock(private), pytest.raises(DirectoryError, match=already):
        directory.lock(private)
    directory.lock(private).close()


@pytest.mark.usefixtures("no_garbage")
def test_a_file_system_without_locks_is_refused(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = psutil.Process().num_fds()
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(DirectoryError, match="cannot be locked: No locks available"):
        directory.lock(private)
    assert psutil.Process().num_fds() == before


@pytest.mark.usefixtures("no_garbage")
def test_an_address_that_cannot_be_used_is_refused(private: Path) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(LinkError, match=r"cannot open the socket .*: No such file or directory"):
        Link("master", f"ipc://{private}/none/master")
    assert psutil.Process().num_fds() <= before + 1  # ZeroMQ keeps one of its first context


def test_a_closed_master_leaves_no_socket(private: Path) -> None:
    for role in ("master", "worker"):
        master = Link("master", directory.address(private))
        assert [file.name for file in private.iterdir()] == ["master"]
        if role == "worker":  # a worker that ends keeps the socket of its master
            assert Link("worker", directory.address(private)).close()
            assert [file.name for file in private.iterdir()] == ["master"]
        assert master.close()
        assert not [*private.iterdir()]


def test_a_failed_activation_is_reported_in_one_line(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private / "master").mkdir()  # occupies the path of the socket
    section = {"role": "master", "directory": str(private), "capacity": "1MiB"}
    ext = runtime.ExtRuntime(ExtConfig.model_validate({"peer": section}))
    scheduler = Scheduler(16, 20, beyond=20)
    ext.slab = scheduler.slab
    attention = object.__new__(CpuAttnBackend)
    runner = SimpleNamespace(attn_backend=attention, device="cpu")
    scheduler.tp_worker = SimpleNamespace(model_runner=runner)
    monkeypatch.setattr(runtime, "current", ext)
    monkeypatch.setattr(planning, "prepare", lambda *_: None)  # reads SGLang's configuration
    with pytest.raises(
        ActivationError, match=r"^peer: cannot open the socket ipc://\S+/master: [\w ]+$"
    ):
        dispatch._ready(dict, scheduler)


def test_powers_are_closed_when_the_scheduler_releases_its_resources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.managers.scheduler import Scheduler as SGLangs

    (hook,) = (each for each in dispatch.HOOKS if each.function is dispatch._leave)
    assert hook.target.endswith(f"Scheduler.{SGLangs.release_host_resources.__name__}")
    left: list[str] = []
    powers = [
        SimpleNamespace(close=lambda name=name: left.append(name)) for name in ("swap", "peer")
    ]
    ext = SimpleNamespace(outside_in=powers[::-1], close=lambda: left.append("engine"))
    monkeypatch.setattr(runtime, "current", ext)
    hook.function(lambda _scheduler: left.append("tiers"), None)
    assert left == ["peer", "swap", "tiers", "engine"]

    def fails(_scheduler: object) -> None:
        raise OSError("a device hangs")

    left.clear()
    with pytest.raises(OSError, match="a device hangs"):
        hook.function(fails, None)
    assert left == ["peer", "swap", "engine"]


@pytest.fixture
def ends() -> Iterator[list[Callable[[], object]]]:
    """Functions that are called after the test, the last one first."""
    ends: list[Callable[[], object]] = []
    yield ends
    for end in reversed(ends):
        end()


def test_a_worker_receives_the_reason_why_its_message_is_refused(
    private: Path, ends: list[Callable[[], object]]
) -> None:
    address = directory.address(private)
    master, worker = Link("master", address, beat=0.05), Link("worker", address, beat=0.05)
    ends += [master.close, worker.close]
    worker.publish([replace(LEND, protocol=7)])
    until(lambda: worker.refused)
    assert "a peer uses protocol 7, but this engine uses protocol" in worker.refused
    assert worker.refused.startswith("the peer does not understand the messages")
    assert not master.refused
    assert "protocol 7" in master.protocol_error
    master.publish([KEEP])
    worker.publish([LEND])
    until(lambda: worker.received() == [KEEP])
    assert not worker.refused
    assert not master.protocol_error


def test_a_worker_with_another_protocol_version_receives_a_refusal(
    private: Path, ends: list[Callable[[], object]]
) -> None:
    address = directory.address(private)
    master = Link("master", address, beat=0.05)
    ends.append(master.close)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, 30_000)
        socket.connect(address)
        for said in (b"nothing of ours", encode(replace(LEND, protocol=99))):
            socket.send(said)
            with pytest.raises(RefusedError):
                decode(socket.recv())
        # A refusal is not answered, or both sides would send refusals forever.
        socket.send(encode(Refusal("a first one")))
        socket.send(b"\xc1")
        with pytest.raises(RefusedError, match="invalid message"):
            decode(socket.recv())


def test_a_protocol_error_is_reported_until_its_peer_sends_valid_messages_or_none(
    private: Path, ends: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = directory.address(private)
    master, worker = Link("master", address, beat=0.05), Link("worker", address, beat=0.05)
    other = Link("worker", address, beat=0.05)
    ends += [master.close, worker.close, other.close]
    worker.publish([replace(LEND, protocol=7)])
    until(lambda: master.protocol_error)
    other.publish([replace(LEND, worker=b"other")])
    until(lambda: master.received())
    assert "protocol 7" in master.protocol_error  # the messages of another peer are valid
    worker.publish([LEND])
    until(lambda: not master.protocol_error)
    worker.publish([replace(LEND, protocol=8)])
    until(lambda: master.protocol_error)
    assert worker.close()
    assert "protocol 8" in master.protocol_error
    monkeypatch.setattr(peer_link, "_ERROR_S", 0.0)
    assert not master.protocol_error


def test_a_link_survives_invalid_and_misattributed_messages(
    private: Path, ends: list[Callable[[], object]]
) -> None:
    address = directory.address(private)
    master, worker = Link("master", address, beat=0.05), Link("worker", address, beat=0.05)
    ends += [master.close, worker.close]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, 30_000)
        socket.connect(address)
        socket.send(b"\x81\xa1a" + b"\x91" * 3000)
        with pytest.raises(RefusedError, match="invalid message"):
            decode(socket.recv())
        # A connection may send messages only for the worker that its identity names.
        socket.send(encode(LEND))
        with pytest.raises(RefusedError, match="two identities"):
            decode(socket.recv())
    assert master.received() == []
    worker.publish([LEND])
    until(lambda: master.received() == [LEND])


def test_a_link_decodes_repeated_messages_once(
    private: Path, ends: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []

    def noted(data: bytes) -> object:
        decoded.append(data)
        return decode(data)

    monkeypatch.setattr(peer_link, "decode", noted)
    address = directory.address(private)
    master, worker = Link("master", address, beat=0.02), Link("worker", address, beat=0.02)
    ends += [master.close, worker.close]
    for number, lend in enumerate((LEND, replace(LEND, busy=True), LEND), 1):
        worker.publish([lend])
        for _ in range(4):
            until(lambda lend=lend: master.received() == [lend])
        assert len(decoded) == number


def test_a_link_keeps_only_the_latest_messages(
    private: Path, ends: list[Callable[[], object]]
) -> None:
    master = Link("master", directory.address(private))
    ends.append(master.close)
    names = [b"%d" % number for number in range(1000)]
    for name in names:
        master._accept(replace(LEND, worker=name))
    assert [lend.worker for lend in master.received()] == names[-256:]
    assert len(master._latest) == 256
