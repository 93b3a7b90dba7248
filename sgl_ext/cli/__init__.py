"""Command line ``sgl-ext``: one module per group of commands."""

import signal
from types import FrameType
from typing import NoReturn

from sgl_ext.cli import caches, configuration, contexts, demonstrations, servers, stored
from sgl_ext.cli.app import app
from sgl_ext.cli.top import top

__all__ = [
    "app",
    "caches",
    "configuration",
    "contexts",
    "demonstrations",
    "main",
    "servers",
    "stored",
    "top",
]


def main() -> None:
    """Runs the command line. Signals that end it let it stop its servers and remove its files."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _end)
    app()


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the removal
    raise SystemExit(128 + number)
