"""Cost model of a scheduler: what it is seeded by, what it observes, and what is shown of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import ScheduleBatch, Scheduler
from sgl_ext.memory.slab import Layout
from sgl_ext.packages import cache_dir
from sgl_ext.planning.profile import PROFILES, Subject, find

_LITTLE = 0.1
"""Share of a forward up to which loads that it waits for do not change its duration."""

logger = logging.getLogger(__name__)


def prepare(ext: ExtRuntime, scheduler: Scheduler) -> None:
    """Prepares the cost model of a scheduler, before the powers are open."""
    import scipy.optimize  # type: ignore[import-untyped]  # noqa: F401  # or the first forward waits for it
    from sglang.srt.runtime_context import get_schedule

    if (size := get_schedule().chunked_prefill_size) is not None and size > 0:
        ext.costs.chunk = size
    if scheduler.metrics_collector is not None:
        # The import of Prometheus' client reads the directory that SGLang has set by now.
        from sgl_ext.engine.core.metrics import Metrics, stage_seconds
        from sgl_ext.engine.core.planning_metrics import PlanningMetrics

        ext.metrics = Metrics(scheduler.metrics_collector.labels)
        ext.planning_metrics = PlanningMetrics(ext.metrics)
        ext.stage_seconds = stage_seconds(ext.metrics)


def subject_of(layout: Layout) -> Subject:
    """Returns the subject of this process's profile: model, dtype, page size and device."""
    return Subject(layout.fingerprint, layout.dtype, layout.page, _device())


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "CPU")
    return f"{model}, {torch.get_num_threads()} threads"


def seed(ext: ExtRuntime, layout: Layout, tiers: Mapping[str, str]) -> None:
    """Seeds the cost model with the profile of this model on this machine, if there is one.

    Args:
        tiers: current :func:`~sgl_ext.planning.profile.devices`.
    """
    if (profile := find(subject_of(layout), cache_dir() / PROFILES)) is not None:
        profile.seed(ext.costs, tiers)
    else:
        logger.info(
            "there is no cost profile of this model on this machine; costs are learnt while "
            "serving, and sgl-ext calibrate creates one"
        )


def observing(ext: ExtRuntime, batch: ScheduleBatch) -> Callable[[float], None]:
    """Returns a function that records the duration of the forward of ``batch``, once it is known.

    Call it before the forward: plans may end with it, and on a GPU the batch has changed when its
    duration is known. Forwards that mostly wait for loads, or that follow plans, say nothing about
    the cost of computing.
    """
    if not batch.forward_mode.is_extend():
        requests = len(batch.reqs)
        return lambda seconds: ext.costs.decoded(requests, seconds)
    parts, before = ext.computed_parts(batch), ext.loading_seconds

    def measured(seconds: float) -> None:
        ext.prefill_seconds += seconds
        if parts is not None and ext.loading_seconds - before <= _LITTLE * seconds:
            ext.costs.forwarded(parts, seconds)

    return measured


def describe(ext: ExtRuntime) -> dict[str, object]:
    """Returns costs and decisions, for ``/server_info``."""
    costs: dict[str, Any] = ext.costs.describe()
    if ext.slab is not None:
        layout = ext.slab.layout
        costs["subject"] = msgspec.to_builtins(subject_of(layout))
        costs["bytes_per_second"] = {
            name: layout.token_bytes / cost.per_token
            for name, cost in [*ext.costs.loads.items()]
            if ext.costs.known(name)
        }
    return {"costs": costs, "decisions": ext.costs.decisions.describe()}
