"""Creation of a scheduler's restorer."""

from __future__ import annotations

import threading
import time

from sgl_ext.config import Restore
from sgl_ext.engine.core import hooks
from sgl_ext.planning.channels import LOAD_TOKENS
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import POLICIES
from sgl_ext.tiers.stack import TierStack


def open_restorer(
    config: Restore, wait: float, stack: TierStack, costs: Costs, chunked_prefill_size: int | None
) -> Planner:
    """Returns a new restorer for a scheduler whose tiers are open.

    Args:
        wait: option ``tiers.wait``, in seconds.
        costs: cost model of the scheduler; its loads and forwards become those of restorations.

    Raises:
        ActivationError: SGLang does not compute prompts in parts, or ``restore.chunk`` is no
            multiple of the page.
    """
    page, size = stack.layout.page, chunked_prefill_size
    require_parts(config, page, size)
    costs.chunk = config.chunk if size is None else min(config.chunk, size // page * page)
    costs.unit = max(LOAD_TOKENS // page, 1) * page
    return Planner(
        stack.host,
        stack.lower,
        POLICIES[config.policy](config.ageing),
        costs,
        page=page,
        unit=costs.unit // page,
        wait=wait,
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
