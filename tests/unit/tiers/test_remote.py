"""Remote tier: processes share pages, and every failure is a miss."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import ROOT
from tier_kit import LARGE, LAYOUT, fill, holds, key, keys, places

from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout
from sgl_ext.serving.server import free_port
from sgl_ext.tiers import mooncake
from sgl_ext.tiers.arena import VERSION, Arena
from sgl_ext.tiers.remote import RemoteTier

try:
    mooncake.library()
except ExtError as error:
    pytest.skip(str(error), allow_module_level=True)

SEGMENT = 64 << 20
DEADLINE = 1.0
PATIENCE = 30.0
"""Longest wait for an expected event, in seconds."""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it has not happened in time"
        time.sleep(0.05)


class Master:
    """Master of a Mooncake store, started with the script for users."""

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = psutil.Popen(
            [
                ROOT / "scripts" / "mooncake.sh",
                f"--rpc_port={self.port}",
                f"--metrics_port={free_port()}",
            ],
            stderr=subprocess.DEVNULL,
        )
        until(self._listens)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()

    def _listens(self) -> bool:
        assert self.process.poll() is None, "the master has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def serve(asked: Connection, master: str, layout: Layout, pages: int) -> None:
    """Runs a tier over its own arena in another process, and serves stores and loads."""
    host = Arena(layout, pages)
    tier = RemoteTier(host, master=master, segment=SEGMENT, deadline=DEADLINE)
    asked.send(tier.available)
    while request := asked.recv():
        operation, numbers = request
        wanted, at = keys(*numbers), places(*range(len(numbers)))
        if operation == "store":
            fill(host, wanted, at)
            asked.send(tier.store(wanted, at))
        else:
            landed = tier.load(wanted, at)
            asked.send(landed & holds(host, wanted, at))
    tier.close()


def deliver(child: int, how: signal.Signals) -> None:
    """Sends a signal to a child process and waits until all its threads have obeyed.

    kill(2) returns before that.
    """
    os.kill(child, how)
    if how == signal.SIGSTOP:
        os.waitid(os.P_PID, child, os.WSTOPPED)
    elif how == signal.SIGKILL:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


class Peer:
    def __init__(self, master: Master, layout: Layout, pages: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ask, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, master.address, layout, pages))
        self.process.start()
        theirs.close()
        assert self._answer()

    def store(self, *numbers: int) -> list[bool]:
        self._ask.send(("store", numbers))
        return list(self._answer())

    def load(self, *numbers: int) -> list[bool]:
        self._ask.send(("load", numbers))
        return list(self._answer())

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        deliver(self.process.pid, how)

    def close(self) -> None:
        self.kill(signal.SIGCONT)
        self.kill()
        self.process.join()

    def _answer(self) -> Any:
        assert self._ask.poll(PATIENCE), "the peer does not answer"
        return self._ask.recv()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def master(stack: ExitStack) -> Master:
    made = Master()
    stack.callback(made.close)
    return made


def opened(
    stack: ExitStack, master: Master, *, layout: Layout = LARGE, segment: int = SEGMENT
) -> tuple[RemoteTier, Arena]:
    host = Arena(layout, 64)
    tier = RemoteTier(host, master=master.address, segment=segment, deadline=DEADLINE)
    stack.callback(tier.close)
    return tier, host


def peer_of(stack: ExitStack, master: Master, layout: Layout = LARGE, pages: int = 64) -> Peer:
    peer = Peer(master, layout, pages)
    stack.callback(peer.close)
    return peer


def raw(stack: ExitStack, master: Master) -> Any:
    """Returns a client of Mooncake's library, which bypasses the tier."""
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master.address) == 0
    stack.callback(store.close)
    return store


def name_of(arena: Arena, number: int) -> str:
    return f"sgl_ext-v{VERSION}-{arena.digest.hex()}-{key(number).hex()}"


def bounded(work: Callable[[], Any]) -> Any:
    """Returns the result of ``work``, which must end within ``PATIENCE`` in any failure."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    return results[0]


def test_processes_share_pages_both_ways(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master)
    peer = peer_of(stack, master)
    ours, theirs = keys(*range(40)), keys(*range(100, 140))
    fill(host, ours, places(*range(40)))
    assert tier.store(ours, places(*range(40))).all()
    assert all(peer.store(*range(100, 140)))
    assert all(peer.load(*range(40)))
    assert tier.lookup(theirs) == 40
    assert tier.lookup([*theirs[:3], key(7777), *theirs[3:]]) == 3
    at = places(*range(63, 23, -1))
    assert tier.load(theirs, at).all()
    assert holds(host, theirs, at).all()
    statistics = tier.statistics()
    assert (statistics.pages, statistics.failures) == (40, {})


def test_pages_in_the_store_are_not_sent_again(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master)
    assert all(peer_of(stack, master).store(0, 2))
    wanted = keys(0, 1, 2, 3)
    fill(host, wanted, places(0, 1, 2, 3))
    assert tier.store(wanted, places(0, 1, 2, 3)).all()
    assert tier.statistics().pages == 2
    assert tier.lookup(wanted) == 4


def test_loads_may_exceed_the_queue_of_the_transport(master: Master, stack: ExitStack) -> None:
    count = 4000
    host = Arena(LAYOUT, count)
    tier = RemoteTier(host, master=master.address, segment=0, deadline=DEADLINE)
    stack.callback(tier.close)
    peer = peer_of(stack, master, LAYOUT, count)
    assert all(peer.store(*range(count)))
    wanted, at = keys(*range(count)), places(*range(count))
    assert tier.lookup(wanted) == count
    assert tier.load(wanted, at).all()
    assert holds(host, wanted, at).all()


def test_removed_page_is_a_miss(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master)
    fill(host, keys(1, 2), places(1, 2))
    assert tier.store(keys(1, 2), places(1, 2)).all()
    assert raw(stack, master).remove(name_of(host, 1), True) == 0
    landed = tier.load(keys(1, 2), places(3, 4))
    assert landed.tolist() == [False, True]
    assert holds(host, keys(2), places(4)).all()
    assert tier.statistics().failures == {"missing": 1}


def test_pages_of_another_layout_are_misses(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master)
    other, _ = opened(stack, master, layout=Layout(**{**_fields(LARGE), "fingerprint": "other"}))
    fill(host, keys(5), places(0))
    assert tier.store(keys(5), places(0)).all()
    assert other.lookup(keys(5)) == 0
    assert not other.load(keys(5), places(0)).any()


def _fields(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


def test_corrupt_pages_are_detected_and_can_be_replaced(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master)
    store = raw(stack, master)
    other = Layout(**{**_fields(LARGE), "fingerprint": "other"})
    kinds = ["garbage", "another key", "another layout", "one bit", "short"]
    for number, kind in enumerate(kinds):
        forged = Arena(other if kind == "another layout" else LARGE, 1)
        wanted = keys(99 if kind == "another key" else number)
        fill(forged, wanted, places(0))
        forged.seal(wanted, places(0), 1)
        page = forged.memory[0]
        if kind == "garbage":
            page[:] = 0xA5
        elif kind == "one bit":
            page[LARGE.block_bytes // 2] ^= 1
        sent = page[:-4096] if kind == "short" else page
        assert store.put(name_of(host, number), sent.tobytes()) == 0
    wanted, at = keys(*range(len(kinds))), places(*range(len(kinds)))
    assert tier.lookup(wanted) == len(kinds)
    landed = tier.load(wanted, at)
    assert [kind for kind, good in zip(kinds, landed, strict=True) if good] == []
    assert tier.statistics().failures == {"checksum": len(kinds)}
    for one in wanted:
        assert tier.lookup([one]) == 0
    fill(host, wanted, at)
    assert tier.store(wanted, at).all()
    assert tier.load(wanted, at + 10).all()
    assert holds(host, wanted, at + 10).all()


def test_store_without_capacity_keeps_nothing(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master, segment=0)
    fill(host, keys(1), places(1))
    assert not tier.store(keys(1), places(1)).any()
    assert tier.statistics().failures == {"full": 1}
    assert tier.available


def test_store_does_not_change_the_arena(master: Master, stack: ExitStack) -> None:
    """Compares the arena: another tier may seal and send the same slots at the same time."""
    tier, host = opened(stack, master)
    fill(host, keys(1), places(1))
    before = host.memory.copy()
    assert tier.store(keys(1), places(1)).all()
    assert np.array_equal(host.memory, before)


def test_calls_are_misses_until_a_killed_master_is_restarted(
    master: Master, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """Kills the master under load: calls end with misses until there is a master again."""
    tier, host = opened(stack, master)
    wanted = keys(*range(16))
    fill(host, wanted, places(*range(16)))
    assert tier.store(wanted, places(*range(16))).all()
    stop = threading.Event()
    wrong: list[int] = []
    rounds = [0, 0]

    def load() -> None:
        at = places(*range(16, 32))
        while not stop.is_set():
            landed = tier.load(wanted, at)
            wrong.extend(np.flatnonzero(landed & ~holds(host, wanted, at)).tolist())
            rounds[0] += 1

    def store() -> None:
        number = 1000
        while not stop.is_set():
            fill(host, keys(number), places(40))
            tier.store(keys(number), places(40))
            number += 1
            rounds[1] += 1

    threads = [threading.Thread(target=work, daemon=True) for work in (load, store)]
    for thread in threads:
        thread.start()
    until(lambda: min(rounds) > 3)
    master.kill()
    until(lambda: not tier.available)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []
    assert bounded(lambda: tier.lookup(wanted)) == 0
    assert not bounded(lambda: tier.load(wanted, places(*range(16)))).any()
    assert not bounded(lambda: tier.store(wanted, places(*range(16)))).any()
    failures = tier.statistics().failures
    assert failures["unreachable"] >= 48
    assert failures.keys() & {"master", "timeout"}
    assert [r.message for r in caplog.records if "is unavailable" in r.message]

    caplog.set_level(logging.INFO, "sgl_ext.tiers.mooncake")
    master.start()
    until(lambda: tier.available)
    assert tier.lookup(wanted) == 0, "a restarted master knows nothing"
    fill(host, wanted, places(*range(16)))
    # The library adds its segment to the new master within about a second.
    until(lambda: bool(tier.store(wanted, places(*range(16))).all()))
    at = places(*range(20, 36))
    assert tier.load(wanted, at).all()
    assert holds(host, wanted, at).all()


def test_lookup_times_out_while_the_master_is_stopped(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master)
    fill(host, keys(1), places(1))
    assert tier.store(keys(1), places(1)).all()
    deliver(master.process.pid, signal.SIGSTOP)
    assert bounded(lambda: tier.lookup(keys(1))) == 0
    assert not tier.available
    assert tier.statistics().failures == {"timeout": 1}
    master.process.send_signal(signal.SIGCONT)
    until(lambda: tier.available)
    assert tier.lookup(keys(1)) == 1
    assert tier.load(keys(1), places(2)).all()


def test_tier_starts_without_a_master(
    master: Master, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    master.kill()
    tier, host = bounded(lambda: opened(stack, master))
    assert not tier.available
    assert "no answer from a master" in caplog.text
    assert tier.lookup(keys(1)) == 0
    master.start()
    until(lambda: tier.available)
    fill(host, keys(1), places(1))
    until(lambda: bool(tier.store(keys(1), places(1)).all()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_pages_of_a_lost_peer_are_misses(
    master: Master, stack: ExitStack, how: signal.Signals
) -> None:
    tier, host = opened(stack, master, segment=0)
    peer = peer_of(stack, master)
    assert all(peer.store(*range(8)))
    wanted, at = keys(*range(8)), places(*range(8))
    assert tier.load(wanted[:1], places(20)).all()
    peer.kill(how)
    before = host.memory.copy()
    assert not bounded(lambda: tier.load(wanted, at)).any()
    failures = tier.statistics().failures
    assert sum(failures.values()) == 8
    assert failures.keys() <= {"peer", "timeout"}
    peer.kill(signal.SIGCONT)
    until(lambda: tier.available)
    assert np.array_equal(host.memory, before), "only a load in progress writes to the arena"


def test_threads_load_and_store_concurrently(master: Master, stack: ExitStack) -> None:
    tier, host = opened(stack, master)
    peer = peer_of(stack, master)
    assert all(peer.store(*range(8)))
    wrong: list[str] = []

    def load() -> None:
        for turn in range(40):
            at = places(*range(8)) + 8 * (turn % 2)
            if not (tier.load(keys(*range(8)), at) & holds(host, keys(*range(8)), at)).all():
                wrong.append(f"load {turn}")

    def store() -> None:
        for turn in range(40):
            new, at = keys(*range(100 + 8 * turn, 108 + 8 * turn)), places(*range(32, 40))
            fill(host, new, at)
            if not tier.store(new, at).all():
                wrong.append(f"store {turn}")

    threads = [threading.Thread(target=work, daemon=True) for work in (load, store)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []
    stored = keys(*range(100, 420))
    assert tier.lookup(stored) == len(stored)
    assert all(peer.load(*range(412, 420)))


def test_close_leaves_no_threads_or_file_descriptors(master: Master) -> None:
    def state() -> tuple[int, int]:
        process = psutil.Process()
        return process.num_threads(), process.num_fds()

    host = Arena(LARGE, 4)
    closed = []

    def once() -> None:
        tier = RemoteTier(host, master=master.address, segment=SEGMENT, deadline=DEADLINE)
        fill(host, keys(1), places(1))
        tier.store(keys(1), places(1))
        tier.close()
        tier.close()
        closed.append(tier)  # Keeps it alive: close must end the threads.
        assert not tier.available
        assert tier.lookup(keys(1)) == 0
        assert not tier.load(keys(1), places(1)).any()

    once()  # The library keeps some threads of its own once it has been used.
    before = state()
    for _ in range(2):
        once()
    until(lambda: state() <= before)


@pytest.mark.parametrize("master", ["", "here", "here:", "here:port", "here:0", ":50051"])
def test_invalid_master_addresses_are_refused(master: str) -> None:
    with pytest.raises(ExtError, match="is not HOST:PORT"):
        RemoteTier(Arena(LAYOUT, 1), master=master)


@pytest.mark.parametrize("options", [{"segment": -1}, {"deadline": 0.0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ExtError, match="segment"):
        RemoteTier(Arena(LAYOUT, 1), master="127.0.0.1:1", **options)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "mooncake-transfer-engine-non-cuda"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs1"),
    ],
)
def test_missing_library_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, said: str
) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(mooncake.importlib, "import_module", refuse)
    with pytest.raises(ExtError, match=said):
        RemoteTier(Arena(LAYOUT, 1), master="127.0.0.1:1")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_master_script_exits_cleanly_on_signals(master: Master, how: signal.Signals) -> None:
    master.process.send_signal(how)
    assert master.process.wait(PATIENCE) == 0
