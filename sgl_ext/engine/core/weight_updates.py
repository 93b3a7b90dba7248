"""Dispatch of changes of a model's weights to the powers and other listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original

listeners: set[Callable[[], None]] = set()
"""Functions that are called before the weights change, also where the extension is not active."""

_UNCHANGED = (
    "Failed to get weights iterator",
    "a weight-update session is already open",
    "update_weights_from_distributed must run between",
    "update_weights_from_tensor must run between",
)
"""Beginnings of SGLang's messages of updates that it has rejected. What it calls a rollback may
have loaded the new weights."""


def _changing(original: Original, updater: object, asked: object, *args: object) -> object:
    """Tells the powers of a change, unless SGLang says that the weights are the same.

    The scheduler does nothing else until the call returns.
    """
    for listener in listeners:
        listener()
    unchanged = False
    try:
        result = original(updater, asked, *args)
        unchanged = _rejected(result)
    finally:
        if not unchanged and (ext := runtime.current) is not None:
            for power in ext.outside_in:
                power.weights_changed()
    return result


def _checking(original: Original, updater: object, asked: Any, *args: object) -> object:
    """Tells the powers of a check only if it overwrites the weights with random numbers."""
    if asked.action != "reset_tensors":
        return original(updater, asked, *args)
    return _changing(original, updater, asked, *args)


def _rejected(result: object) -> bool:
    """Returns whether SGLang has rejected an update, which has left the weights as they were."""
    message = getattr(result, "message", None)
    failed = getattr(result, "success", True) is False
    return failed and isinstance(message, str) and message.startswith(_UNCHANGED)


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WHY = "neither an external cache nor a platform is notified when the weights change"
HOOKS = (
    *(
        hooks.Hook(f"{_UPDATER}.{method}", "around", _changing, _WHY)
        for method in (
            "begin_weight_update",
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
    hooks.Hook(f"{_UPDATER}.check_weights", "around", _checking, _WHY),
)
