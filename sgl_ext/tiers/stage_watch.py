"""Watch over the processes of the other pipeline stages, so that the log says which one has ended.

A stage that waits for another one fails with an error of its transport, which names no stage.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress

logger = logging.getLogger(__name__)

_GRACE_S = 0.2
"""Time after which this process was killed, too, if the whole server is killed, in seconds."""


class StageWatch:
    """Thread that logs one line when another stage ends before this watch is closed.

    Args:
        processes: process id of each other stage, by its number.
    """

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = processes
        self._closed = threading.Event()
        # No daemon: a stage that fails because of another one ends before its grace is over.
        self._thread = threading.Thread(target=self._run, name="sgl_ext-stages")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        stages: dict[int, int] = {}
        poll = select.poll()
        with ExitStack() as descriptors:
            for stage, pid in self._processes.items():
                with suppress(OSError):  # without a descriptor, the stage is not watched
                    descriptor = os.pidfd_open(pid)
                    descriptors.callback(os.close, descriptor)
                    stages[descriptor] = stage
                    poll.register(descriptor, select.POLLIN)
            ended: list[tuple[int, int]] = []
            main = threading.main_thread()
            while not ended and not self._closed.is_set() and main.is_alive():
                ended = poll.poll(1e3 * _GRACE_S)
        if ended:
            self._closed.wait(_GRACE_S)
            stage = stages[ended[0][0]]
            logger.error(
                "sgl_ext: pipeline stage %d (process %d) has ended, and the server cannot go on "
                "without it; the lines before this one say why, unless it was killed",
                stage, self._processes[stage],
            )  # fmt: skip
