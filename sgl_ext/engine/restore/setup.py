"""Makes the restorer of a scheduler, with the costs that were measured on this machine."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from sgl_ext.config import Restore, Tiers
from sgl_ext.engine.core import hooks
from sgl_ext.memory.slab import Layout
from sgl_ext.packages import cache_dir
from sgl_ext.restore.costs import ComputeCost, Costs, LoadCost
from sgl_ext.restore.policies import POLICIES
from sgl_ext.restore.profile import HOST, PROFILES, Subject, devices, find
from sgl_ext.restore.restorer import Restorer
from sgl_ext.tiers.stack import TierStack

_UNIT = 128
"""Tokens of one load, at most."""

logger = logging.getLogger(__name__)


def open_restorer(
    config: Restore, tiers: Tiers, stack: TierStack, chunked_prefill_size: int | None
) -> Restorer:
    """Makes the restorer of a scheduler that has its tiers.

    Raises:
        ActivationError: SGLang computes prompts whole, or chunk and page do not go together.
    """
    page, size = stack.layout.page, chunked_prefill_size
    require_parts(config, page, size)
    chunk = config.chunk if size is None else min(config.chunk, size // page * page)
    return Restorer(
        stack.host,
        stack.lower,
        POLICIES[config.policy](config.ageing),
        _costs(stack, devices(tiers), chunk),
        page=page,
        unit=max(_UNIT // page, 1),
        wait=tiers.wait,
        hits=stack.hits,
    )


def require_parts(config: Restore, page: int, size: int | None) -> None:
    """Raises ActivationError if prompts are not computed in parts of whole pages.

    Args:
        page: tokens.
        size: ``--chunked-prefill-size``, as resolved.
    """
    if size is None or size < page:
        raise hooks.ActivationError(
            f"restore computes prompts part by part, and --chunked-prefill-size is {size}; "
            f"give one of {page} or more"
        )
    if config.chunk % page:
        raise hooks.ActivationError(
            f"restore.chunk is {config.chunk} tokens, no multiple of the page of {page}; "
            f"{-(-config.chunk // page) * page} is one"
        )


def subject_of(layout: Layout) -> Subject:
    """What is measured in this process."""
    return Subject(layout.fingerprint, layout.dtype, layout.page, _device())


def _costs(stack: TierStack, now: dict[str, str], chunk: int) -> Costs:
    """Measured ones; without a profile those that the first forwards and loads will say."""
    tiers = [lower.tier.name for lower in stack.lower]
    if (profile := find(subject_of(stack.layout), cache_dir() / PROFILES)) is not None:
        lower = {tier: now.get(tier, "") for tier in tiers}
        return profile.costs(lower, chunk, now.get(HOST, ""))
    logger.info("restore has no profile of this model here; sgl-ext calibrate makes one")
    import scipy.optimize  # type: ignore[import-untyped]  # noqa: F401  # the first prompt would wait

    return Costs(ComputeCost(), {tier: LoadCost() for tier in tiers}, chunk)


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "CPU")
    return f"{model}, {torch.get_num_threads()} threads"


def describe(restorer: Restorer, stack: TierStack) -> dict[str, Any]:
    """What is believed to cost what, for ``/server_info``."""
    costs = restorer.costs
    return {
        "subject": msgspec.to_builtins(subject_of(stack.layout)),
        "measured": sorted(costs.measured),
        "crossover": costs.crossover,
        "compute": asdict(costs.compute),
        "loads": {name: asdict(load) for name, load in costs.loads.items()},
        "interrupted": restorer.interrupted,
        "forwards": [*costs.forwards],
        "loaded": {name: [*each] for name, each in [*costs.loaded_lately.items()]},
    }
