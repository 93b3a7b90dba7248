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
    how: str,
    costs: Costs,
    *,
    first: int,
    pages: int,
    page: int,
    layers: int,
    layered: bool,
    rid: str,
) -> Strategy | None:
    """Returns the strategy for ``pages`` in host memory; None if they are only loaded.

    Under ``auto``, pages are restored if at least one layer would be computed before all are loaded
    (Equation 1), in the way that the cost model expects to be faster. By tokens, the tokens after
    the prefix need a forward of their own, with its overhead. By layers, each computed token
    attends to all tokens before it. The length at which both are equal is L_delta of §3.1.

    Args:
        how: the option ``restore.host``.
        first: number of the first of the pages in the prompt.
        page: tokens of a page.
        layers: layers of the model.
        layered: whether the model can be run by layers; if not, prefixes are restored by tokens.
        rid: id of the request.
    """
    if not pages:
        return None
    if how != "auto":
        return None if how == "never" else Strategy(how) if layered else Strategy.TOKENS
    if not costs.known(HOST):
        return None  # the first load measures how long loads take
    begin, end = first * page, (first + pages) * page
    loading, computing = costs.loads[HOST].seconds(end - begin), costs.compute.seconds(begin, end)
    computed = loading / (loading + computing)  # share of the layers, at the speed of both
    ways = _ways(costs, HOST, begin, end)
    if not layered:
        del ways["layers"]
    both = {"load": loading, "both": min(ways.values())}
    choice = "load" if computed * layers < 1 else "both"
    if costs.decisions.chose("load_or_compute", choice, both, rid) == "load":
        return None
    return Strategy(costs.decisions.least("tokens_or_layers", ways, rid))


def layers_are_faster(costs: Costs, tier: str, begin: int, end: int, rid: str) -> bool:
    """Returns whether a prefix in a lower tier should be restored by layers; if not, by tokens.

    False as long as the speed of loads or of forwards is not known.

    Args:
        tier: name of the tier.
        begin: position of the first token in the prompt.
        end: position behind the last token.
        rid: id of the request.
    """
    if not (costs.known(tier) and costs.known(COMPUTE)):
        return False
    ways = _ways(costs, tier, begin, end)
    return costs.decisions.least("tokens_or_layers", ways, rid) == "layers"


def _ways(costs: Costs, channel: str, begin: int, end: int) -> dict[str, float]:
    """Returns the expected seconds of both strategies."""
    loading, computing = (
        costs.loads[channel].seconds(end - begin),
        costs.compute.seconds(begin, end),
    )
    return {
        "tokens": costs.per_loaded(channel) * (end - costs.meeting(begin, end, channel)),
        "layers": loading / (loading + computing) * costs.compute.work(begin, end),
    }


def computed_share(costs: Costs, begin: int, end: int) -> float:
    """Returns the share of the tokens of a range that are computed while the others load.

    One half as long as the speed of loads or of forwards is not known.

    Args:
        begin: position of the first token in the prompt; the others are in host memory as well.
        end: position behind the last token.
    """
    if not (costs.known(HOST) and costs.known(COMPUTE)):
        return 0.5
    return (costs.meeting(begin, end, HOST) - begin) / (end - begin)
