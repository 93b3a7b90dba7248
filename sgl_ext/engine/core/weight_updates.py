"""Dispatch of changes of a model's weights to the powers and other listeners."""

from __future__ import annotations

from collections.abc import Callable

from sgl_ext.engine.core import hooks, runtime

listeners: set[Callable[[], None]] = set()
"""Functions that are called before the weights change, also where the extension is not active."""


def _changing(_updater: object, *_args: object, **_kw: object) -> None:
    if (ext := runtime.current) is not None:
        for power in ext.outside_in:
            power.weights_changed()
    for listener in listeners:
        listener()


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
HOOKS = tuple(
    hooks.Hook(
        f"{_UPDATER}.{method}",
        "before",
        _changing,
        "neither an external cache nor a platform is notified when the weights change",
    )
    for method in (
        "begin_weight_update",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "resume_memory_occupation",
    )
)
