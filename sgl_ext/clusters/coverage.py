"""Decision whether to prefetch a layer, by the share of its missing blocks that was prefetched."""

from __future__ import annotations

_LOWEST = 0.5
"""Minimum coverage of a layer that is prefetched."""
_WEIGHT = 0.1
"""Weight of the latest step in the moving average."""
_RISE = 0.001
"""Increase of the coverage in each step that is skipped, so that prefetching is tried again."""


class Coverage:
    """Moving average of the share of a layer's missing blocks that was prefetched."""

    def __init__(self) -> None:
        self._share = 1.0

    def step(self) -> bool:
        """Begins a step and returns whether to prefetch the layer in it."""
        if self._share >= _LOWEST:
            return True
        self._share += _RISE
        return False

    def observe(self, share: float) -> None:
        """Adds the share of the blocks that were not in memory in a step and were prefetched."""
        self._share += _WEIGHT * (share - self._share)
