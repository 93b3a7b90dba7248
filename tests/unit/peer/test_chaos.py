"""Tests of masters and workers as processes that are killed and paused at random moments.

Their memory is the host's, or that of a simulated CUDA device.

``SGLEXT_ROUNDS`` sets the number of rounds (default: 12; the long run takes 200).
"""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from peer_process import TERMS, Said
from transfer_kit import fake_cuda

ROUNDS = int(os.environ.get("SGLEXT_ROUNDS", "12"))
PROGRAM = Path(__file__).with_name("peer_process.py")
DEADLINE_S = 60.0
LONGEST_WAIT_S = TERMS.deadline + 30.0
"""Longest wait of a worker for its own memory, in seconds, with slack for a busy machine.

``test_pairs.py`` tests shorter waits on a simulated clock.
"""


class Peer:
    """Process of a master or a worker."""

    def __init__(self, role: str, directory: Path, seed: int, *library: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), role, str(directory), str(seed), *library],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def ask(self) -> Said:
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
        said = msgspec.json.decode(line, type=Said)
        assert said.waiting < LONGEST_WAIT_S, "it waits for its own memory"
        return said

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def progresses(self) -> None:
        """Waits until more requests have been served."""
        self._more("served", "it serves nobody")

    def has_its_memory(self) -> None:
        """Waits until a worker has got memory for one more request of unforeseen size."""
        self._more("large", "it waits for its own memory")

    def _more(self, what: str, otherwise: str) -> None:
        before = getattr(self.ask(), what)
        end = time.monotonic() + DEADLINE_S
        while getattr(self.ask(), what) <= before:
            assert time.monotonic() < end, otherwise
            time.sleep(0.01)

    @property
    def mapped(self) -> set[str]:
        """Names of the KV memory that the process has mapped, its own and that of others."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        names = re.findall(r"/memfd:(sgl_ext-kv-\w+) ", maps)
        return {*names, *re.findall(r" (\d+) +/memfd:fake-cuda ", maps)}

    def end(self) -> None:
        assert self.process.poll() is None, self.errors()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["host", "device"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return [str(fake_cuda(tmp_path))] if request.param == "device" else []


@pytest.fixture
def peers(tmp_path: Path, library: list[str]) -> Iterator[dict[str, Peer]]:
    directory = tmp_path / "peers"
    peers = {role: Peer(role, directory, 0, *library) for role in ("master", "worker", "worker 2")}
    yield peers
    for peer in peers.values():
        peer.end()


def lending(peers: dict[str, Peer]) -> None:
    """Waits until both workers lend memory and the master uses lent memory."""
    end = time.monotonic() + DEADLINE_S
    while not all(peer.ask().other for peer in peers.values()):
        assert time.monotonic() < end, {name: peer.ask() for name, peer in peers.items()}
        time.sleep(0.01)


def test_requests_stay_intact_when_peers_are_killed_or_paused(
    peers: dict[str, Peer], library: list[str], tmp_path: Path
) -> None:
    choose = random.Random(ROUNDS)  # noqa: S311
    lending(peers)
    for seed in range(1, 1 + ROUNDS):
        name = choose.choice(list(peers))
        time.sleep(choose.random() * 0.2)
        if choose.random() < 0.5:
            peers[name].end()
            time.sleep(choose.random() * 0.3)
            peers[name] = Peer(name.split()[0], tmp_path / "peers", seed, *library)
        else:  # for longer than the deadline and the lease, or not
            peers[name].process.send_signal(signal.SIGSTOP)
            time.sleep(choose.random() * 1.2)
            if choose.random() < 0.5:
                progress({other: peers[other] for other in peers if other != name})
            peers[name].process.send_signal(signal.SIGCONT)
        progress(peers)
    lending(peers)
    settled(peers, library)


def progress(peers: dict[str, Peer]) -> None:
    """Waits until each process serves requests, and each worker gets memory that it needs."""
    for name, peer in peers.items():
        peer.progresses()
        if name != "master":
            peer.has_its_memory()


def settled(peers: dict[str, Peer], library: list[str]) -> None:
    """Waits until no memory is mapped that was replaced or belongs to processes that have ended."""
    end = time.monotonic() + DEADLINE_S
    while True:
        said = {name: peer.ask() for name, peer in peers.items()}
        mapped = {name: peer.mapped for name, peer in peers.items()}
        files = {name: set(each.files) for name, each in said.items()}
        there = set().union(*files.values())
        leaks = {name: mapped[name] - files[name] for name in peers if name != "master"}
        leaks["master"] = mapped["master"] - there
        if not any(leaks.values()) and not any(each.retired for each in said.values()):
            break
        assert time.monotonic() < end, (said, leaks)
        time.sleep(0.01)
    for name, each in said.items():
        assert each.descriptors < 40 + (len(there) if library else 0), name


def test_a_directory_has_one_master(peers: dict[str, Peer], tmp_path: Path) -> None:
    lending(peers)
    second = Peer("master", tmp_path / "peers", 1)
    assert second.process.wait(DEADLINE_S) != 0
    error = second.errors()
    assert f"already has a master (process {peers['master'].process.pid})" in error
    lending(peers)
