"""Creation of a scheduler's restorer, with the costs that were measured on this machine."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from sgl_ext.config import Restore, Tiers
from sgl_ext.engine.core import hooks
from sgl_ext.memory.slab import Layout
from sgl_ext.packages import cache_dir
from sgl_ext.planning.channels import LOAD_TOKENS
from sgl_ext.planning.costs import ComputeCost, Costs, LoadCost
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import POLICIES
from sgl_ext.planning.profile import HOST, PROFILES, Subject, devices, find
from sgl_ext.tiers.stack import TierStack

logger = logging.getLogger(__name__)


def open_restorer(
    config: Restore, tiers: Tiers, stack: TierStack, chunked_prefill_size: int | None
) -> Planner:
    """Returns a new restorer for a scheduler whose tiers are open.

    Raises:
        ActivationError: SGLang does not compute prompts in parts, or ``restore.chunk`` is no
            multiple of the page.
    """
    page, size = stack.layout.page, chunked_prefill_size
    require_parts(config, page, size)
    chunk = config.chunk if size is None else min(config.chunk, size // page * page)
    return Planner(
        stack.host,
        stack.lower,
        POLICIES[config.policy](config.ageing),
        _costs(stack, devices(tiers), chunk),
        page=page,
        unit=max(LOAD_TOKENS // page, 1),
        wait=tiers.wait,
        hits=stack.hits,
        clock=time.monotonic,
        lock=threading.Lock(),
    )


def require_parts(config: Restore, page: int, size: int | None) -> None:
    """Checks that prompts are computed in parts of whole pages.

    Args:
        page: tokens of a page.
        size: resolved ``--chunked-prefill-size``, in tokens; None if SGLang does not chunk prompts.

    Raises:
        ActivationError: prompts are not chunked, or ``restore.chunk`` is no multiple of the page.
    """
    if size is None or size < page:
        raise hooks.ActivationError(
            f"restore requires chunked prefill, but --chunked-prefill-size is {size}; set it to "
            f"{page} or more"
        )
    if config.chunk % page:
        raise hooks.ActivationError(
            f"restore.chunk is {config.chunk} tokens, which is not a multiple of the page size "
            f"{page}; set it to {-(-config.chunk // page) * page}, for example"
        )


def subject_of(layout: Layout) -> Subject:
    """Returns the subject of this process's profile: model, dtype, page size and device."""
    return Subject(layout.fingerprint, layout.dtype, layout.page, _device())


def _costs(stack: TierStack, now: dict[str, str], chunk: int) -> Costs:
    """Returns the costs of a profile; without one, defaults that the first forwards and loads
    replace.

    Args:
        now: current :func:`~sgl_ext.planning.profile.devices` of the tiers.
        chunk: tokens of a forward that restores.
    """
    tiers = [lower.tier.name for lower in stack.lower]
    if (profile := find(subject_of(stack.layout), cache_dir() / PROFILES)) is not None:
        lower = {tier: now.get(tier, "") for tier in tiers}
        return profile.costs(lower, chunk, now.get(HOST, ""))
    logger.info(
        "restore has no profile of this model on this machine; run sgl-ext calibrate to create one"
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


def describe(restorer: Planner, stack: TierStack) -> dict[str, object]:
    """Returns the estimated costs and recent observations, for ``/server_info``."""
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
