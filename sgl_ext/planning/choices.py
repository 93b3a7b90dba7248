"""Decisions that several powers take by the cost model, each counted in its ``decisions``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from sgl_ext.planning.costs import COMPUTE, DECODE, HOST, MOVE, Costs

_CLEARLY = 2.0
"""Ratio of loading to computing from which on a request leaves without its KV. The decision cannot
be reversed, and estimates may be wrong."""

_FEW = 3
"""Moves that are measured before a decision avoids others. The first one of a process may take many
times as long as those that follow."""

_TRIAL = 16
"""Reciprocal of the share of time that trials of slower moves may cost."""

SwapIn = Literal["auto", "wait", "overlap"]
"""Option ``swap.swap_in``."""


def waits_for_swap_in(costs: Costs, tokens: int, running: int, rid: str) -> bool:
    """Returns whether the scheduler should wait for a swap-in (FastSwitch §3.2).

    While the scheduler waits, every running request loses the tokens that it would have generated.
    While it does not wait, the resumed request loses every iteration that begins before its KV is
    loaded. The scheduler therefore waits for short swap-ins only, and for longer ones if few run.

    Args:
        tokens: tokens to load from host memory.
        running: requests that would decode meanwhile.
        rid: id of the resumed request.
    """
    if not (running and costs.known(HOST) and costs.known(DECODE)):
        return True  # nothing else runs, or nothing is measured yet
    loading = costs.loads[HOST].seconds(tokens)
    iterations = loading / costs.decode.seconds(running)
    choice = "wait" if _waits(iterations, running) else "overlap"
    seconds = {"wait": loading, "overlap": loading}
    return costs.decisions.chose("wait_or_overlap", choice, seconds, rid) == "wait"


def _waits(iterations: float, running: int) -> bool:
    return iterations * running <= math.ceil(iterations)


def recomputes(costs: Costs, begin: int, end: int, running: int, how: SwapIn, rid: str) -> bool:
    """Returns whether a swapped request should be recomputed although host memory has its KV.

    Compares the seconds that all requests lose until it runs again: the running ones while the
    scheduler waits or computes, the request itself in any case.

    Args:
        begin: tokens of the request that are on the device.
        end: tokens of the request that had KV.
        running: requests that decode.
        how: how swap-ins are loaded.
    """
    if begin >= end or not (costs.known(HOST, _FEW) and costs.known(COMPUTE)):
        return False
    loading, computing = costs.loads[HOST].seconds(end - begin), costs.computing(begin, end)
    iteration = costs.decode.seconds(max(running, 1))
    waits = how == "wait" or not (running and costs.known(DECODE))
    if waits or (how == "auto" and _waits(loading / iteration, running)):
        lost = loading * (running + 1)
    else:
        lost = math.ceil(loading / iteration) * iteration
    kind, seconds = "swap_in_or_recompute", {"swap_in": loading, "recompute": computing}
    if _moves(costs, kind, seconds, rid, better=lost <= computing * (running + 1)):
        return False
    costs.decisions.ended(kind, rid, None)
    return True


def swapped_in(costs: Costs, rid: str, seconds: float) -> None:
    """Records how long the KV of a swapped request took to load; 0 if that is not known yet."""
    for kind in ("swap_in_or_recompute", "wait_or_overlap"):
        costs.decisions.ended(kind, rid, seconds)


def keeps(costs: Costs, tokens: int) -> bool:
    """Returns whether a request that is preempted should keep its KV in host memory.

    Copying it there takes no time of the scheduler. It is worth it unless recomputing is clearly
    faster than loading it again.

    Args:
        tokens: tokens of the request that have KV.
    """
    if not (costs.known(HOST, _FEW) and costs.known(COMPUTE)):
        return True
    seconds = {"keep": costs.loads[HOST].seconds(tokens), "drop": costs.computing(0, tokens)}
    better = seconds["keep"] <= seconds["drop"] * _CLEARLY
    return _moves(costs, "leave", seconds, better=better)


def links(costs: Costs, tokens: int, begin: int, rid: str) -> bool:
    """Returns whether chunks should be linked into a prompt instead of computed.

    Args:
        tokens: tokens of the chunks that would be moved.
        begin: position of the first of them in the prompt.
        rid: id of the request.
    """
    if not (tokens and costs.known(MOVE, _FEW) and costs.known(COMPUTE)):
        return True
    seconds = {
        "link": costs.loads[MOVE].seconds(tokens),
        "compute": costs.computing(begin, begin + tokens),
    }
    better = seconds["link"] <= seconds["compute"]
    return _moves(costs, "link_or_compute", seconds, rid, better=better)


def linked(costs: Costs, tokens: int, rid: str, seconds: float) -> None:
    """Records how long chunks took to be moved into a prompt."""
    costs.loaded(MOVE, tokens, seconds)
    costs.decisions.ended("link_or_compute", rid, seconds)


def _moves(
    costs: Costs, kind: str, seconds: Mapping[str, float], key: str | None = None, *, better: bool
) -> bool:
    """Counts a decision between moving KV and computing it, and returns whether it is moved.

    A small share of these decisions moves KV although computing is expected to be faster, so that
    the cost of moving is measured again.

    Args:
        seconds: predictions of both, moving first.
        better: whether moving is expected to be better.
    """
    (move, moving), (compute, computing) = seconds.items()
    period = max(int(_TRIAL * moving / computing), _TRIAL)
    moves = better or costs.decisions.count(kind) % period == period - 1
    costs.decisions.chose(kind, move if moves else compute, seconds, key)
    return moves
