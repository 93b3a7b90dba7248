"""Liveness check of another process."""

from __future__ import annotations

import os
import select
import weakref


class Process:
    """A process given by its pid.

    A process that cannot be opened when this object is created counts as ended. If another process
    has the pid by then, that process is watched instead, so a caller must not rely on :meth:`alive`
    alone.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:
            self._fd = -1
            return
        weakref.finalize(self, os.close, self._fd).atexit = False

    def alive(self) -> bool:
        """Returns whether the process has not ended; a stopped process is alive."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)
