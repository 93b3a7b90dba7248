"""HiCache's loads as slow as over another machine's link, for benchmarks.

A layer counts as loaded when the link would have brought it, so that loading overlaps with
computing as HiCache means it to; the copies themselves are done at once here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.cache_controller import LayerLoadingEvent

from sgl_ext.errors import ExtError

EMULATED = "SGL_EXT_EMULATED_HICACHE"
"""Bytes a second between host memory and the device, if HiCache is to be slowed down."""

logger = logging.getLogger(__name__)


class EmulatedLink:
    """When layers would have come over a link of ``rate`` bytes a second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._ready: dict[tuple[int, int], float] = {}
        self._bytes = 0

    def moved(self, layers: Sequence[torch.Tensor], tokens: int) -> None:
        """Rows of one layer's K and V have been copied to the device."""
        self._bytes += sum(tokens * layer[0].nbytes for layer in layers)

    def complete(self, event: Any, layer: int) -> None:
        """What was moved since the last one was this layer."""
        self._free = max(self._free, time.perf_counter()) + self._bytes / self._rate
        self._bytes = 0
        self._ready[id(event), layer] = self._free

    def wait(self, event: Any, layer: int) -> None:
        """Returns when the layer has come."""
        time.sleep(max(self._ready.get((id(event), layer), 0.0) - time.perf_counter(), 0.0))


def install() -> EmulatedLink | None:
    """Slows HiCache's loads down, if the environment asks for it.

    Raises:
        ExtError: the environment asks for no speed.
    """
    if not (asked := os.environ.get(EMULATED)):
        return None
    try:
        rate = float(asked)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ExtError(f"{EMULATED}={asked} is no number of bytes a second")
    logger.warning("HiCache's loads are slowed down to %.0f B/s", rate)
    link = EmulatedLink(rate)
    own = LayerLoadingEvent.complete, LayerLoadingEvent.wait

    def complete(event: Any, layer: int) -> None:
        own[0](event, layer)
        link.complete(event, layer)

    def wait(event: Any, layer: int) -> None:
        own[1](event, layer)
        link.wait(event, layer)

    LayerLoadingEvent.complete, LayerLoadingEvent.wait = complete, wait
    return link
