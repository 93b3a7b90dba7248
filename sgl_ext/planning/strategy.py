"""Strategy for a prefix in host memory: which part is computed while the rest loads (§3.1)."""

from __future__ import annotations

from enum import Enum

from sgl_ext.planning.costs import COMPUTE, HOST, Costs


class Strategy(Enum):
    """Part of a prefix that is computed while the rest loads."""

    TOKENS = "tokens"
    """The first tokens, in all layers."""
    LAYERS = "layers"
    """The lower layers, for all tokens."""


def choose_strategy(
    how: str, costs: Costs, *, first: int, pages: int, page: int, layers: int, rid: str
) -> Strategy | None:
    """Returns the strategy for ``pages`` in host memory; None if they are only loaded.

    Under ``auto``, pages are restored if at least one layer would be computed before all are loaded
    (Equation 1).

    Args:
        how: the option ``restore.host``.
        first: number of the first of the pages in the prompt.
        page: tokens of a page.
        layers: layers of the model.
        rid: id of the request.
    """
    if not pages:
        return None
    if how != "auto":
        return None if how == "never" else Strategy(how)
    if not costs.known(HOST):
        return None  # the first load measures how long loads take
    begin, end = first * page, (first + pages) * page
    loading, computing = costs.loads[HOST].seconds(end - begin), costs.compute.seconds(begin, end)
    # Computing and loading share the work in the proportion of their speeds.
    both = {"load": loading, "both": loading * computing / (loading + computing)}
    choice = "load" if layers * loading < loading + computing else "both"
    if costs.decisions.chose("load_or_compute", choice, both, rid) == "load":
        return None
    by = Strategy.TOKENS if end - begin >= costs.crossover else Strategy.LAYERS
    costs.decisions.chose("tokens_or_layers", by.value, {by.value: both["both"]}, rid)
    return by


def computed_share(costs: Costs) -> float:
    """Returns the share of tokens that are computed while the others load from host memory.

    One half as long as the speed of loads or of forwards is not known.
    """
    if not (costs.known(HOST) and costs.known(COMPUTE)):
        return 0.5
    loading = costs.loads[HOST].per_token
    return loading / (loading + costs.compute.seconds(0, costs.chunk) / costs.chunk)
