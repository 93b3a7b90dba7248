"""The configuration that SGLang's ``ServerArgs`` carries into every process, and refusals.

The scheduler names the configuration in its ready message, which the launcher compares
(:mod:`~sgl_ext.engine.launch.launcher`); only then does the server answer.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from sgl_ext import __version__
from sgl_ext.config import ExtConfig
from sgl_ext.engine.core.sglang_types import ServerArgs

CARRIED = "_ext_config"
"""Attribute of ``ServerArgs``; the underscore makes it bookkeeping, which is pickled with it."""


REPORT_KEY = "sgl_ext"
"""Key of :func:`report` in a scheduler's ready message, and so in ``/server_info``."""

_in_worker = False

commanded = False
"""Whether a command line of this process asked for the extension."""


class Carried:
    """An :class:`ExtConfig` that activates the process it arrives in."""

    __slots__ = ("config", "launcher")

    def __init__(self, config: ExtConfig, launcher: int | None = None) -> None:
        self.config = config
        self.launcher = launcher
        """Process that launches with this record; None until it does."""

    def __reduce__(self) -> NoReturn:
        # Replaced by the arrival module: without it a child would run stock.
        raise TypeError("import sgl_ext.engine.core.arrival before a configuration is pickled")


def carried_by(server_args: ServerArgs) -> ExtConfig | None:
    """The configuration a ``ServerArgs`` record carries; None if it runs stock."""
    carried: Carried | None = getattr(server_args, CARRIED, None)
    return carried.config if carried is not None else None


def mark_launch(server_args: ServerArgs) -> None:
    """Notes that this process launches others with the record: they are its workers."""
    getattr(server_args, CARRIED).launcher = os.getpid()


def report(config: ExtConfig) -> dict[str, Any]:
    """What a process says is active in it: part of ``/server_info``."""
    return {"version": __version__, "config": config.resolved()}


def refuse(error: Exception) -> NoReturn:
    """Stops a start: a command ends with one line, a program gets the exception."""
    if commanded or _in_worker:
        raise SystemExit(f"sgl_ext: {error}") from error
    raise error


def in_worker() -> bool:
    """Whether this process was spawned by SGLang to work for a launcher."""
    return _in_worker


def enter(launcher: int | None) -> bool:
    """Notes which process launched this one, and returns whether it is a worker of that process.

    A record that is pickled before its launch (a server that is started in a child process) makes
    no worker, and neither does a copy within the launcher.
    """
    global _in_worker
    _in_worker = launcher not in (None, os.getpid())
    return _in_worker
