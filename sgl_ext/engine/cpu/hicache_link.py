"""Emulation of another machine's link for HiCache's loads, for benchmarks.

A layer counts as loaded when the link would have delivered it, so that loading overlaps with
computation as HiCache intends. The copies themselves are done at once here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import torch

from sgl_ext.engine.core import hooks
from sgl_ext.errors import ExtError

EMULATED = "SGLEXT_EMULATED_HICACHE"
"""Environment variable: bytes per second between host memory and the device; unset for no limit."""

logger = logging.getLogger(__name__)


class EmulatedLink:
    """Delivery times of layers over a link of ``rate`` bytes per second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._ready: dict[tuple[int, int], float] = {}
        self._bytes = 0

    def moved(self, layers: Sequence[torch.Tensor], tokens: int) -> None:
        """Records that rows of one layer's K and V have been copied to the device."""
        self._bytes += sum(tokens * layer[0].nbytes for layer in layers)

    def complete(self, event: object, layer: int) -> None:
        """Records that the bytes that were moved since the last call belong to this layer."""
        self._free = max(self._free, time.perf_counter()) + self._bytes / self._rate
        self._bytes = 0
        self._ready[id(event), layer] = self._free

    def wait(self, event: object, layer: int) -> None:
        """Waits until the link would have delivered the layer."""
        time.sleep(max(self._ready.get((id(event), layer), 0.0) - time.perf_counter(), 0.0))


current: EmulatedLink | None = None
"""Link that the environment has asked for; None if HiCache's loads are not slowed down."""


def _complete(_result: None, event: object, layer: int) -> None:
    if current is not None:
        current.complete(event, layer)


def _wait(_result: None, event: object, layer: int) -> None:
    if current is not None:
        current.wait(event, layer)


_EVENT = "sglang.srt.managers.cache_controller.LayerLoadingEvent"
_WHY = "the events of HiCache's loads are those of a device"
HOOKS = (
    hooks.Hook(f"{_EVENT}.complete", "after", _complete, _WHY),
    hooks.Hook(f"{_EVENT}.wait", "after", _wait, _WHY),
)


def install() -> None:
    """Slows HiCache's loads down if the environment asks for it.

    Raises:
        ExtError: the environment's value is no positive number.
    """
    global current
    if not (asked := os.environ.get(EMULATED)):
        return
    try:
        rate = float(asked)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ExtError(
            f"{EMULATED}={asked} is invalid; expected a positive number of bytes per second"
        )
    logger.warning("HiCache's loads are throttled to %.0f B/s", rate)
    current = EmulatedLink(rate)
    hooks.apply(HOOKS)
