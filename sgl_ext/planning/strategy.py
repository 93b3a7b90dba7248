"""Strategy for a prefix in host memory: which part is computed while the rest loads (§3.1)."""

from __future__ import annotations

from enum import Enum

from sgl_ext.planning.costs import Costs
from sgl_ext.tiers.throughput import Traffic


class Strategy(Enum):
    """Part of a prefix that is computed while the rest loads."""

    TOKENS = "tokens"
    """The first tokens, in all layers."""
    LAYERS = "layers"
    """The lower layers, for all tokens."""


def choose_strategy(
    how: str, costs: Costs, loads: Traffic, *, first: int, pages: int, page: int, layers: int
) -> Strategy | None:
    """Returns the strategy for ``pages`` in host memory; None if they are only loaded.

    Under ``auto``, pages are restored if at least one layer would be computed before all are loaded
    (Equation 1).

    Args:
        how: the option ``restore.host``.
        loads: loads from host memory so far.
        first: number of the first of the pages in the prompt.
        page: tokens of a page.
        layers: layers of the model.
    """
    if not pages:
        return None
    if how != "auto":
        return None if how == "never" else Strategy(how)
    if not loads.seconds:
        return None  # the first load measures how long loads take
    loading = pages * loads.seconds / loads.pages
    begin, end = first * page, (first + pages) * page
    if layers * loading < loading + costs.compute.seconds(begin, end):
        return None
    return Strategy.TOKENS if end - begin >= costs.crossover else Strategy.LAYERS


def computed_share(costs: Costs, loads: Traffic, page: int) -> float:
    """Returns the share of tokens that are computed while the others load from host memory.

    Args:
        loads: loads from host memory so far; without any, the share is one half.
        page: tokens of a page.
    """
    if not loads.pages:
        return 0.5
    loading = loads.seconds / loads.pages / page
    return loading / (loading + costs.compute.seconds(0, costs.chunk) / costs.chunk)
