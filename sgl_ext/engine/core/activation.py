"""Configuration that SGLang's ``ServerArgs`` carries into every process, and refusal of a start.

The scheduler reports the configuration in its ready message, and the launcher compares it
(:mod:`~sgl_ext.engine.launch.launcher`). The server answers requests only after this check.
"""

from __future__ import annotations

import os
from typing import NoReturn

from sgl_ext import __version__
from sgl_ext.config import ExtConfig
from sgl_ext.engine.core.sglang_types import ServerArgs

CARRIED = "_ext_config"
"""Attribute of ``ServerArgs`` that holds a :class:`Carried`.

The underscore makes it bookkeeping for SGLang, which allows it and pickles it with the record.
"""


REPORT_KEY = "sgl_ext"
"""Key of :func:`report` in a scheduler's ready message, and so in ``/server_info``."""

_in_worker = False

commanded = False
"""True once a command line of this process has used an option of the extension."""


class Carried:
    """An :class:`ExtConfig` that activates the process in which it is unpickled."""

    __slots__ = ("config", "launcher")

    def __init__(self, config: ExtConfig, launcher: int | None = None) -> None:
        self.config = config
        self.launcher = launcher
        """Id of the process that launches others with this record; None before the launch."""

    def __reduce__(self) -> NoReturn:
        # The arrival module registers a reducer, which takes precedence over this method. Without
        # that reducer a child process would run stock SGLang.
        raise TypeError("import sgl_ext.engine.core.arrival before a configuration is pickled")


def carried_by(server_args: ServerArgs) -> ExtConfig | None:
    """Returns the configuration that a ``ServerArgs`` record carries; None for stock SGLang."""
    carried: Carried | None = getattr(server_args, CARRIED, None)
    return carried.config if carried is not None else None


def mark_launch(server_args: ServerArgs) -> None:
    """Records this process as the launcher. Processes that receive the record are its workers."""
    getattr(server_args, CARRIED).launcher = os.getpid()


def report(config: ExtConfig) -> dict[str, object]:
    """Returns the version and configuration that this process runs, for ``/server_info``."""
    return {"version": __version__, "config": config.resolved()}


def refuse(error: Exception) -> NoReturn:
    """Stops the start with an error.

    Raises:
        SystemExit: in a command or a worker, which exit with one line.
        Exception: ``error`` itself, in a program.
    """
    if commanded or _in_worker:
        raise SystemExit(f"sgl_ext: {error}") from error
    raise error


def in_worker() -> bool:
    """Returns whether SGLang spawned this process as a worker of a launcher."""
    return _in_worker


def enter(launcher: int | None) -> bool:
    """Records and returns whether this process is a worker of the process ``launcher``.

    A record that is pickled before its launch (a server that is started in a child process) makes
    no worker, and neither does a copy within the launcher.
    """
    global _in_worker
    _in_worker = launcher not in (None, os.getpid())
    return _in_worker
