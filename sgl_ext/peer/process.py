"""Whether another process still runs."""

from __future__ import annotations

import os
import select
import weakref


class Process:
    """A process by its number; one that has ended when this is made counts as ended.

    A number that belongs to another process by then is taken for a process that runs: whoever asks
    must not wait for its end alone.
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
        """Whether it runs, or is stopped."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)
