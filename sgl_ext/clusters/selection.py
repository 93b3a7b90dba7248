"""Number of blocks of a context that a query is given, equally many of each device (Swarm §6.1)."""

from __future__ import annotations

import math


def each_of(share: float, blocks: int, devices: int) -> int:
    """Returns the largest number of blocks that are selected from a device."""
    return -(-blocks_of(share, blocks, devices) // devices)


def blocks_of(share: float, blocks: int, devices: int) -> int:
    """Returns the largest number of blocks that are selected from all devices."""
    each = max(math.ceil(share * blocks / devices), 1)
    return min(each * devices, blocks)
