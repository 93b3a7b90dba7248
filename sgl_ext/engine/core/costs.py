"""Costs of a scheduler, as far as they were measured on this machine."""

from __future__ import annotations

import logging
from pathlib import Path

from sgl_ext.memory.slab import Layout
from sgl_ext.packages import cache_dir
from sgl_ext.planning.costs import ComputeCost, Costs, LoadCost
from sgl_ext.planning.profile import HOST, PROFILES, Subject, find
from sgl_ext.tiers.stack import TierStack

logger = logging.getLogger(__name__)


def subject_of(layout: Layout) -> Subject:
    """Returns the subject of this process's profile: model, dtype, page size and device."""
    return Subject(layout.fingerprint, layout.dtype, layout.page, _device())


def costs_of(stack: TierStack, now: dict[str, str], chunk: int) -> Costs:
    """Returns the costs of a profile; without one, defaults that the first forwards and loads
    replace.

    Args:
        now: current :func:`~sgl_ext.planning.profile.devices` of the tiers.
        chunk: tokens of a forward that computes a part of a prompt while the rest loads.
    """
    tiers = [lower.tier.name for lower in stack.lower]
    if (profile := find(subject_of(stack.layout), cache_dir() / PROFILES)) is not None:
        lower = {tier: now.get(tier, "") for tier in tiers}
        return profile.costs(lower, chunk, now.get(HOST, ""))
    logger.info(
        "there is no profile of this model on this machine; run sgl-ext calibrate to create one"
    )
    import scipy.optimize  # type: ignore[import-untyped]  # noqa: F401  # or the first prompt waits for it

    return Costs(ComputeCost(), {tier: LoadCost() for tier in tiers}, chunk)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "CPU")
    return f"{model}, {torch.get_num_threads()} threads"
