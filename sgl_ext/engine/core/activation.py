"""Carries an activated configuration into every SGLang process, or stops the start.

The configuration rides on SGLang's own ``ServerArgs`` record as a :class:`Carried` object.
Unpickling it in a child process activates that process before any of its code runs: a child
without a working extension dies there, and the launcher reports it. The scheduler also names the
configuration in its ready message, which the launcher compares
(:mod:`~sgl_ext.engine.launch.launcher`); only then does the server answer.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from sgl_ext import __version__
from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import hooks

CARRIED = "_ext_config"
"""Attribute of ``ServerArgs``; the underscore makes it bookkeeping, which is pickled with it."""


_SCHEDULER = "sglang.srt.managers.scheduler"

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

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrive, (self.config, self.launcher))


def carried_by(server_args: Any) -> ExtConfig | None:
    """The configuration a ``ServerArgs`` record carries; None if it runs stock."""
    carried: Carried | None = getattr(server_args, CARRIED, None)
    return carried.config if carried is not None else None


def mark_launch(server_args: Any) -> None:
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


def _arrive(config: ExtConfig, launcher: int | None) -> Carried:
    global _in_worker
    # A record that is pickled before its launch (a server started in a child process) makes no
    # worker, and neither does a copy within the launcher.
    _in_worker = launcher not in (None, os.getpid())
    try:
        hooks.require_supported_sglang()
        # A spawned process imports its entry point before its arguments arrive, so every
        # scheduler has this module; in another worker that has it, the hooks are never reached.
        if _in_worker and _SCHEDULER in sys.modules:
            from sgl_ext.engine.core import scheduler

            scheduler.activate(config)
    except hooks.ActivationError as error:
        refuse(error)
    return Carried(config, launcher)
