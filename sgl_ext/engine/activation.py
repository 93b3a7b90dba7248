"""Carries an activated configuration into every SGLang process, or stops the start.

The configuration rides on SGLang's own ``ServerArgs`` record as a :class:`Carried` object.
Unpickling it in a child process activates that process before any of its code runs: a child
without a working extension dies there, and the launcher reports it. The scheduler also names the
configuration in its ready message, which the launcher compares (:mod:`.launcher`); only then
does the server answer.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from sgl_ext import __version__
from sgl_ext.config import AVAILABLE, ExtConfig
from sgl_ext.engine import hooks

CARRIED = "_ext_config"
"""Attribute of ``ServerArgs``; the underscore makes it bookkeeping, which is pickled with it."""


_ENGINE = "sglang.srt.entrypoints.engine"
_SCHEDULER = "sglang.srt.managers.scheduler"
_WORKERS = frozenset({_SCHEDULER, "sglang.srt.managers.detokenizer_manager"})

_in_worker = False

commanded = False
"""Whether a command line of this process asked for the extension."""


class Carried:
    """An :class:`ExtConfig` that activates the process it arrives in."""

    __slots__ = ("config",)

    def __init__(self, config: ExtConfig) -> None:
        self.config = config

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrive, (self.config,))


def carried_by(server_args: Any) -> ExtConfig | None:
    """The configuration a ``ServerArgs`` record carries; None if it runs stock."""
    carried: Carried | None = getattr(server_args, CARRIED, None)
    return carried.config if carried is not None else None


def report(config: ExtConfig) -> dict[str, Any]:
    """What a process says is active in it: part of ``/server_info``."""
    return {"version": __version__, "config": config.resolved()}


def require_available(config: ExtConfig) -> None:
    """Raises ActivationError for a section this version cannot start."""
    unavailable = sorted(set(config.sections()) - AVAILABLE)
    if unavailable:
        raise hooks.ActivationError(
            f"the configuration switches on {', '.join(unavailable)}, which sgl_ext {__version__} "
            "does not have yet; remove it, `sgl-ext doctor` lists what this version can start"
        )


def refuse(error: Exception) -> NoReturn:
    """Stops a start: a command ends with one line, a program gets the exception."""
    if commanded or _in_worker:
        raise SystemExit(f"sgl_ext: {error}") from error
    raise error


def in_worker() -> bool:
    """Whether this process was spawned by SGLang to work for a launcher."""
    return _in_worker


def _arrive(config: ExtConfig) -> Carried:
    global _in_worker
    # A worker's entry point is imported before its arguments are unpickled; a launcher that was
    # itself handed a record (a server started in a child process) has imported the engine too,
    # or nothing of SGLang's yet.
    _in_worker = _ENGINE not in sys.modules and not _WORKERS.isdisjoint(sys.modules)
    try:
        hooks.require_supported_sglang()
        if _in_worker and _SCHEDULER in sys.modules:
            from sgl_ext.engine import scheduler

            scheduler.activate(config)
    except hooks.ActivationError as error:
        refuse(error)
    return Carried(config)
