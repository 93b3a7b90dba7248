"""Masters and workers as processes that are killed and paused at any moment.

``SGL_EXT_ROUNDS`` says how often (default: 12; the long run takes 200).
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("SGL_EXT_ROUNDS", "12"))
PROGRAM = Path(__file__).with_name("peer_process.py")
DEADLINE_S = 60.0


class Peer:
    """One process."""

    def __init__(self, role: str, directory: Path, seed: int) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), role, str(directory), str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def ask(self) -> tuple[int, ...]:
        """Requests served, blocks or bytes of the other side, bytes that others may still have
        mapped, descriptors."""
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write("?\n")
            process.stdin.flush()
        except BrokenPipeError:
            pytest.fail(self.errors())
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        assert ready, "it hangs"
        line = process.stdout.readline()
        if not line:
            pytest.fail(self.errors())
        return tuple(map(int, line.split()))

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def progresses(self) -> None:
        """Waits until more requests have been served."""
        before = self.ask()[0]
        end = time.monotonic() + DEADLINE_S
        while self.ask()[0] <= before:
            assert time.monotonic() < end, "it serves nobody"
            time.sleep(0.01)

    def end(self) -> None:
        assert self.process.poll() is None, self.errors()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[dict[str, Peer]]:
    directory = tmp_path / "peers"
    peers = {role: Peer(role, directory, 0) for role in ("master", "worker", "worker 2")}
    yield peers
    for peer in peers.values():
        peer.end()


def lending(peers: dict[str, Peer]) -> None:
    """Waits until both workers lend, and the master uses it."""
    end = time.monotonic() + DEADLINE_S
    while not all(peer.ask()[1] for peer in peers.values()):
        assert time.monotonic() < end, {name: peer.ask() for name, peer in peers.items()}
        time.sleep(0.01)


def test_nobody_reads_what_another_has_written(peers: dict[str, Peer], tmp_path: Path) -> None:
    choose = random.Random(ROUNDS)  # noqa: S311
    lending(peers)
    for seed in range(1, 1 + ROUNDS):
        name = choose.choice(list(peers))
        time.sleep(choose.random() * 0.2)
        if choose.random() < 0.5:
            peers[name].end()
            time.sleep(choose.random() * 0.3)
            peers[name] = Peer(name.split()[0], tmp_path / "peers", seed)
        else:  # past the deadline and the lease, or not
            peers[name].process.send_signal(signal.SIGSTOP)
            time.sleep(choose.random() * 1.2)
            peers[name].process.send_signal(signal.SIGCONT)
        for peer in peers.values():
            peer.progresses()
    lending(peers)
    settled(peers)


def settled(peers: dict[str, Peer]) -> None:
    """Waits until nothing is left of memory that was replaced."""
    end = time.monotonic() + DEADLINE_S
    while any(peer.ask()[2] for peer in peers.values()):
        assert time.monotonic() < end, {name: peer.ask() for name, peer in peers.items()}
        time.sleep(0.01)
    for name, peer in peers.items():
        assert peer.ask()[3] < 40, name


def test_a_directory_has_one_master(peers: dict[str, Peer], tmp_path: Path) -> None:
    lending(peers)
    second = Peer("master", tmp_path / "peers", 1)
    assert second.process.wait(DEADLINE_S) != 0
    error = second.errors()
    assert f"has a master already (process {peers['master'].process.pid})" in error
    lending(peers)
