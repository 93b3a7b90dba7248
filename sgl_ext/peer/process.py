"""Identity of this process, and liveness check of another."""

from __future__ import annotations

import os
import select
import weakref
from contextlib import suppress
from typing import NamedTuple

import psutil


class Identity(NamedTuple):
    """Identity of a process for its peers.

    Attributes:
        name: random name, which no later process with the same pid has.
        pid: process id.
    """

    name: bytes
    pid: int

    @property
    def socket(self) -> str:
        """Address at which the process hands over device memory that it lends."""
        return f"sgl_ext-peer-{self.pid}-{self.name.hex()}"


def identity() -> Identity:
    """Returns a new identity of this process."""
    return Identity(os.urandom(8), os.getpid())


class Process:
    """A process given by its pid.

    If another process has the pid by the time this object is created, that process is watched
    instead, so a caller must not rely on :meth:`alive` alone.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = None
        with suppress(OSError):  # no descriptor is left, say: which does not mean that it has ended
            self._fd = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._fd).atexit = False

    def alive(self) -> bool:
        """Returns whether the process has not ended; a stopped process is alive.

        Without a descriptor a later process with the same pid counts as this one: memory that it
        might still write is then replaced rather than reused.
        """
        if self._fd is None:
            return psutil.pid_exists(self.pid)
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)
