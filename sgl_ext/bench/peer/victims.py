"""A master and its worker that are killed and paused, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sgl_ext.bench.harness.mapped import mapped_segments, segments
from sgl_ext.bench.harness.server import Server, serve
from sgl_ext.bench.peer.files import (
    files_of,
    leaked_files,
    opened_files,
    processes_of,
)
from sgl_ext.engine.launch import run_directory
from sgl_ext.memory.mapping import HUGE_PAGE
from sgl_ext.models import SMOLLM2, prepare

_SETTLE_S = 20.0
"""In which what has died has to be gone."""
_LATER_START = "from sgl_ext.engine.launch import run_directory; run_directory.subdirectory()"


@dataclass(frozen=True)
class Dead:
    """What was killed.

    Attributes:
        group: of its processes.
        shared: inodes of what it had in /dev/shm.
    """

    role: str
    group: int
    shared: frozenset[int]


class Victims:
    """Servers of which a dead one is replaced by another with the same arguments.

    Args:
        stack: ends those that replaced others.
    """

    def __init__(
        self, large: Server, master: Server, worker: Server, stack: ExitStack, logs: Path
    ) -> None:
        self.large = large
        self.servers = {"master": master, "worker": worker}
        self._stack, self._logs = stack, logs
        self._directory = Path(json.loads(worker.system.arguments[-1])["peer"]["directory"])
        self._started = 0
        self._dead: list[Dead] = []
        # Where a part of a huge page is replaced, both files may have all of it.
        self._room = 8 * HUGE_PAGE + sum(
            status.st_size
            for each in (master, worker)
            for status in opened_files(processes_of(each.process.pid)).values()
        )

    def kill(self, role: str) -> None:
        server = self.servers[role]
        shared = mapped_segments(processes_of(server.process.pid))
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
        self._dead.append(Dead(role, server.process.pid, shared))

    def start(self, role: str) -> None:
        """In the place of the one that was killed.

        Raises:
            ExtError: it does not start.
        """
        system = self.servers[role].system
        self._started += 1
        logs = self._logs / f"again-{self._started}"
        (self.servers[role],) = self._stack.enter_context(serve([system], prepare(SMOLLM2), logs))

    @contextmanager
    def paused(self, role: str) -> Iterator[None]:
        group = self.servers[role].process.pid
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)

    def leaks(self) -> list[str]:
        """What is left of the dead, or of a loan that is over, when there was time to go."""
        give_up = time.monotonic() + _SETTLE_S
        while (found := self._leaks()) and time.monotonic() < give_up:
            time.sleep(0.5)
        self._dead.clear()
        return found

    def _leaks(self) -> list[str]:
        found = []
        for dead in self._dead:
            found += [
                f"process {pid} of the killed {dead.role}" for pid in processes_of(dead.group)
            ]
            found += map(str, segments(dead.shared))
        left = {path.name for path in self._directory.iterdir()} - {"master", "lock"}
        found += [f"{self._directory / name}" for name in sorted(left)]
        master, worker = (files_of(each) for each in self.servers.values())
        return found + leaked_files(master, worker, self._room)


def start_later() -> None:
    """What a server that starts removes of those before it that were killed.

    As if all of them had one temporary directory, and were a minute old: what is younger may belong
    to one that starts.
    """
    for directory in run_directory.subdirectory().parent.glob("*/sgl_ext-*"):
        os.utime(directory, (0, 0))
        environment = {**os.environ, "TMPDIR": str(directory.parent)}
        subprocess.run([sys.executable, "-c", _LATER_START], env=environment, check=True)
