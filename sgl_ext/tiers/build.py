"""Construction of the tier stack from its configuration."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from sgl_ext.config import Tiers
from sgl_ext.config.tiers import KeepAfter
from sgl_ext.config.values import EmulatedDevice
from sgl_ext.memory.slab import Slab
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.tickets import COPY_DEADLINE_S
from sgl_ext.memory.transfer import Lane, TransferEngine
from sgl_ext.planning.costs import Costs
from sgl_ext.tiers.arena import Arena, stride_of
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.layer_loads import LayerLoads
from sgl_ext.tiers.layer_major import layer_major
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.stack import TierStack
from sgl_ext.tiers.threaded import ThreadedTier
from sgl_ext.tiers.tier import Tier

logger = logging.getLogger(__name__)


def emulated(
    engine: TransferEngine, device: EmulatedDevice | None, *, piece_bytes: int = 256 << 10
) -> Callable[[Lane], Lane] | None:
    """Returns a function that wraps a lane to emulate ``device``; None if ``device`` is None.

    Logs a warning that the lane is emulated.

    Args:
        piece_bytes: Bytes of a piece. Each piece costs some thread switches, which a real device
            does not.
    """
    if device is None:
        return None
    rate, latency = int(device.bytes_per_second), device.latency
    operations = device.operations_per_second or float("inf")
    logger.warning(
        "a device is throttled to %d B/s, %.3g s latency and %.3g operations/s",
        rate, latency, operations,
    )  # fmt: skip
    return lambda lane: engine.throttled_lane(
        lane, bytes_per_second=rate, operations_per_second=operations, latency=latency,
        piece_bytes=piece_bytes,
    )  # fmt: skip


def open_stack(
    config: Tiers,
    slab: Slab,
    streams: Streams | None = None,
    *,
    costs: Costs | None = None,
    by_layer: bool = False,
    engine: TransferEngine | None = None,
) -> TierStack:
    """Opens the tiers of ``config`` and returns the stack of a scheduler process.

    Args:
        streams: Streams on which the slab is used.
        costs: Cost model of the scheduler.
        by_layer: See :class:`~sgl_ext.tiers.copies.DeviceCopies`.
        engine: Transfer engine, which the caller closes after the stack; None for one of its own.

    Raises:
        ExtError: A tier cannot be opened. The message says what was asked for, what was found and
            what to do.
    """
    costs = costs or Costs()
    with ExitStack() as undo:
        closing = []
        if engine is None:
            engine = TransferEngine()
            undo.callback(engine.close)
            closing.append(engine.close)
        capacity = config.host.capacity if config.host else config.staging
        layout = slab.layout if config.layout == "token_major" else layer_major(slab.layout)
        beside = 0 if slab.device is not None else slab.size
        arena = Arena(layout, capacity // stride_of(layout), beside=beside)
        if arena.back():
            logger.warning("host memory for KV has no huge pages; copies are slower")
        on_device = slab.device is not None
        engine.register(slab.address, slab.reach, owner=slab, device=on_device)
        pinned = on_device or config.ssd is not None
        engine.register(arena.address, arena.size, owner=arena, pinned=pinned)
        lane: Lane = engine.host_lane() if slab.device is None else engine.cuda_lane(slab.device)
        if link := emulated(engine, config.host.link if config.host else None):
            lane = link(lane)
        slow = emulated(engine, config.host.emulate if config.host else None)
        loads = slow(lane) if slow else lane
        copies = DeviceCopies(
            engine, lane, slab, arena, loads=loads, streams=streams, costs=costs, by_layer=by_layer
        )
        wake = threading.Event()
        lower: list[LowerTier] = []
        for tier, keep_after in _lower_tiers(config, arena, engine):
            lower.append(
                ThreadedTier(
                    tier,
                    keep_after=None if keep_after == "auto" else keep_after,
                    wake=wake.set,
                    costs=costs,
                    page=slab.layout.page,
                )
            )
            undo.callback(lower[-1].close)
        stack = TierStack(
            HostPages(arena.pages, copies.reading),
            copies,
            LayerLoads(copies.groups, COPY_DEADLINE_S, copies.streams),
            lower,
            costs=costs,
            wake=wake,
            closing=closing,
        )
        undo.pop_all()
    return stack


def _lower_tiers(
    config: Tiers, arena: Arena, engine: TransferEngine
) -> Iterator[tuple[Tier, KeepAfter]]:
    """Opens and yields the tiers below host memory, the nearest first, each with ``keep_after``."""
    if (ssd := config.ssd) is not None:
        from sgl_ext.tiers.ssd import SsdTier

        wrap = emulated(engine, ssd.emulate)
        tier = SsdTier(arena, engine, ssd.directories, ssd.capacity, fsync=ssd.fsync, wrap=wrap)
        yield tier, ssd.keep_after
    if (remote := config.remote) is not None:
        from sgl_ext.tiers.remote import RemoteTier

        yield (
            RemoteTier(arena, master=remote.master, segment=remote.segment, host=remote.host),
            remote.keep_after,
        )
