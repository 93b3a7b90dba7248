"""Choice of the prompts that are restored, and of the strategy for host memory (CacheFlow §3.1)."""

from __future__ import annotations

from typing import NamedTuple

from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.restore.host_prefixes import Strategy
from sgl_ext.restore.restorer import Restorer
from sgl_ext.tiers.stack import TierStack


class Prompt(NamedTuple):
    """Prompt whose prefix may be restored."""

    first: int
    """Number of the first page that is not on the device."""
    most: int
    """Maximum pages from there on that can be restored; SGLang may look up more."""
    behind: int
    """Tokens of the prompt."""
    precedence: int
    """Precedence, smaller first: from SGLang's priority if it schedules by priority, else 0."""


def prompt_of(req: Req, prefix: int, page: int) -> Prompt | None:
    """Returns the request's prompt; None if it is not to be restored.

    Args:
        prefix: tokens of the prompt that are on the device.
        page: tokens of a page.
    """
    if req.session is not None or req.multimodal_inputs is not None:
        return None
    tokens = len(req.full_untruncated_fill_ids)
    first, most = prefix // page, req._compute_max_prefix_len(tokens) // page
    return Prompt(first, most - first, tokens, _precedence(req)) if most > first else None


def _precedence(req: Req) -> int:
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    if not schedule.enable_priority_scheduling or req.priority is None:
        return 0
    priority: int = req.priority
    return priority if schedule.schedule_low_priority_values_first else -priority


def strategy(
    how: str, stack: TierStack, restorer: Restorer, prompt: Prompt, pages: int
) -> Strategy | None:
    """Returns the strategy for a prompt's ``pages`` in host memory; None if they are only loaded.

    Under ``auto``, pages are restored if at least one layer would be computed before all are loaded
    (Equation 1).

    Args:
        how: the option ``restore.host``.
        pages: number of consecutive pages from ``prompt.first`` on.
    """
    if not pages:
        return None
    if how != "auto":
        return None if how == "never" else Strategy(how)
    if not stack.loads.traffic.seconds:
        return None  # the first load measures how long loads take
    loading = pages * stack.loads.traffic.seconds / stack.loads.traffic.pages
    begin, end = prompt.first * restorer.page, (prompt.first + pages) * restorer.page
    computing = restorer.costs.compute.seconds(begin, end)
    if stack.layout.layers * loading < loading + computing:
        return None
    return Strategy.TOKENS if end - begin >= restorer.costs.crossover else Strategy.LAYERS
