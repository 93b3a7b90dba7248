"""Choice of the running requests that are preempted for a more urgent one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Running(NamedTuple):
    """Running request that can be preempted."""

    urgency: int
    """Priority; a larger value is more urgent."""
    arrived: float
    """Time of arrival, in seconds."""
    tokens: float
    """Tokens of KV that its preemption frees: those it holds and those reserved for it."""


def choose_victims(
    running: Sequence[Running], urgency: int, lacking: float, margin: int
) -> list[int]:
    """Chooses the least urgent requests, the newest first, until enough memory is free.

    Args:
        running: requests that can be preempted.
        urgency: urgency of the request that needs memory.
        lacking: tokens of KV that it lacks; below 0 if it lacks only a place in the batch, for
            which one request is preempted.
        margin: a request is preempted only if the difference in urgency exceeds this.

    Returns:
        Indices of the victims; empty if they would not free enough.
    """
    order = sorted(range(len(running)), key=lambda at: (running[at].urgency, -running[at].arrived))
    victims: list[int] = []
    for at in order:
        if urgency - running[at].urgency <= margin:
            break
        victims.append(at)
        lacking -= running[at].tokens
        if lacking < 0:
            break
    return victims if lacking < 0 else []
