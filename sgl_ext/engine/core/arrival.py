"""Activation of a process when the configuration arrives in it, or refusal of the start.

SGLang's own ``ServerArgs`` record carries the configuration as a :class:`Carried` object.
Unpickling it in a child process activates that process before any of its code runs. A child process
without a working extension ends there, and the launcher reports it.
"""

from __future__ import annotations

import copyreg
import sys
from typing import Any

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import activation, hooks
from sgl_ext.engine.core.activation import CARRIED, Carried
from sgl_ext.engine.core.sglang_types import ServerArgs

_SCHEDULER = "sglang.srt.managers.scheduler"


def carry(server_args: ServerArgs, config: ExtConfig) -> None:
    """Attaches the configuration to a ``ServerArgs`` record, to be pickled with it."""
    setattr(server_args, CARRIED, Carried(config))


def arrive(config: ExtConfig, launcher: int | None) -> Carried:
    """Rebuilds a pickled :class:`Carried`; does not return if the extension cannot be active."""
    in_worker = activation.enter(launcher)
    try:
        hooks.require_supported_sglang()
        # A spawned process imports its entry point before its arguments arrive, so this module is
        # loaded in every scheduler. Another worker may have loaded it, but never calls the hooks.
        if in_worker and _SCHEDULER in sys.modules:
            from sgl_ext.engine.core import scheduler

            scheduler.activate(config)
    except hooks.ActivationError as error:
        activation.refuse(error)
    return Carried(config, launcher)


def _reduce(carried: Carried) -> tuple[Any, ...]:
    return (arrive, (carried.config, carried.launcher))


copyreg.pickle(Carried, _reduce)
