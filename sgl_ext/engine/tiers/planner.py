"""Creation of a scheduler's planner."""

from __future__ import annotations

import threading
import time

from sgl_ext.config import ExtConfig, Restore
from sgl_ext.planning.channels import load_unit
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import POLICIES
from sgl_ext.tiers.arena import stride_of
from sgl_ext.tiers.stack import TierStack

_SPARE = 8
"""Divisor of host memory. The quotient is the most that wants leave free for preempted requests:
pages that are being loaded cannot be evicted before they have landed."""
_FIRST_COME = "cake"
"""Policy if no prompt is computed while its pages load."""


def open_planner(config: ExtConfig, stack: TierStack, costs: Costs) -> Planner:
    """Returns a new planner for a scheduler whose tiers are open.

    Args:
        costs: cost model of the scheduler.

    Raises:
        RuntimeError: no tiers are configured.
    """
    if config.tiers is None:
        raise RuntimeError("a planner requires tiers")
    page, restore = stack.layout.page, config.restore or Restore()
    swapped = 0 if config.swap is None else config.swap.capacity // stride_of(stack.layout)
    policy = _FIRST_COME if config.restore is None else restore.policy
    return Planner(
        stack.host,
        stack.lower,
        POLICIES[policy](restore.ageing),
        costs,
        page=page,
        unit=load_unit(page),
        wait=config.tiers.wait,
        spare=min(swapped, stack.host.capacity // _SPARE),
        hits=stack.hits,
        clock=time.monotonic,
        lock=threading.Lock(),
    )
