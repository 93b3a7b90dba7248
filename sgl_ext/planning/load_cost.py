"""Cost of moving KV through a channel: a tier, a link, or the memory of a peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadCost:
    """Cost in seconds of one transfer of consecutive tokens."""

    latency: float = 0.0
    per_token: float = 1e-3

    def seconds(self, tokens: int) -> float:
        return self.latency + tokens * self.per_token
