"""Methods of SGLang's schedulers that change a model's weights."""

from __future__ import annotations

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
METHODS = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "resume_memory_occupation",
)
