"""CUDA graphs: a forward whose rows or attention a power changes runs eagerly, all others replay.

A graph replays kernels at the addresses of its capture and calls no Python. Powers that only move
KV between forwards need nothing here, because the addresses of the KV pool do not change.
"""

from __future__ import annotations

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import ForwardBatch


def _can_run_graph(original: Original, runner: object, batch: ForwardBatch) -> bool:
    ext = runtime.current
    if ext is not None and (ext.eager or any(power.eager(batch) for power in ext.inside_out)):
        return False
    return bool(original(runner, batch))


_RUNNERS = "sglang.srt.model_executor.runner"
_WHY = "SGLang decides by the shape of a batch whether a captured graph can compute it"
HOOKS = (
    hooks.Hook(
        f"{_RUNNERS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        "around",
        _can_run_graph,
        _WHY,
    ),
    hooks.Hook(
        f"{_RUNNERS}.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
        "around",
        _can_run_graph,
        _WHY,
    ),
)
