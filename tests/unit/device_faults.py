"""Faults that scenarios on the simulated device have to find, each planted by one replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest import MonkeyPatch
from simulated_streams import SimulatedStreams

from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.engine.kv.resize import KVResizer
from sgl_ext.engine.restore import by_layers, by_tokens
from sgl_ext.engine.swap import resume
from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.native_ticket import NativeTicket
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.tickets import State
from sgl_ext.memory.transfer import Region, TransferEngine
from sgl_ext.tiers.arena import Arena
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.holds import Holds
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.layer_loads import LayerLoads
from sgl_ext.tiers.stack import TierStack

Plant = Callable[[MonkeyPatch], None]


def _at_once(method: str) -> Plant:
    """Has the copies of a method of ``DeviceCopies`` wait for no stream."""

    def plant(patch: MonkeyPatch) -> None:
        real = getattr(DeviceCopies, method)

        def instead(copies: DeviceCopies, *arguments: Any, **named: Any) -> Any:
            streams, copies.streams = copies.streams, Streams()
            try:
                return real(copies, *arguments, **named)
            finally:
                copies.streams = streams

        patch.setattr(DeviceCopies, method, instead)

    return plant


def _nothing(target: object, name: str, result: object = None) -> Plant:
    return lambda patch: patch.setattr(target, name, lambda *_, **__: result)


def _fill_goes_on(patch: MonkeyPatch) -> None:
    def fill(holds: Holds, pages: Any, blocks: Any) -> None:
        holds.begin_fill(pages, blocks)

    patch.setattr(Holds, "fill", fill)


def _fill_tokens_goes_on(patch: MonkeyPatch) -> None:
    def fill_tokens(holds: Holds, places: Any, slots: Any) -> None:
        holds._copies.fill_tokens(places, slots)

    patch.setattr(Holds, "fill_tokens", fill_tokens)


def _not_reading(patch: MonkeyPatch) -> None:
    real = HostPages.__init__
    patch.setattr(HostPages, "__init__", lambda self, capacity, _=None: real(self, capacity))


def _taken_back_at_once(patch: MonkeyPatch) -> None:
    def taken_back(ticket: Any, _streams: object) -> bool:
        if ticket.bytes_done:
            return ticket.state in (State.CANCELLED, State.FAILED)
        ticket.cancel()
        return True  # what has begun may still land

    patch.setattr(by_layers, "taken_back", taken_back)
    patch.setattr(by_tokens, "taken_back", taken_back)


def _before_closing(end: Callable[[Any, Arena], object]) -> Plant:
    """Does something to host memory before its engine is closed."""

    def plant(patch: MonkeyPatch) -> None:
        real = TierStack.close

        def close(stack: TierStack) -> None:
            streams, arena = stack.streams, stack._copies._arena
            assert isinstance(streams, SimulatedStreams)
            end(streams.device.fake, arena)
            real(stack)

        patch.setattr(TierStack, "close", close)

    return plant


_unregister = _before_closing(lambda fake, arena: fake.cudaHostUnregister(arena.address))
_free = _before_closing(lambda fake, arena: fake.fake_free(arena.address, arena.size))


def _not_pinned(patch: MonkeyPatch) -> None:
    real = TransferEngine.register

    def register(engine: TransferEngine, *place: int, pinned: bool = False, **named: Any) -> Region:
        return real(engine, *place, **named)

    patch.setattr(TransferEngine, "register", register)


def _other_blocks(patch: MonkeyPatch) -> None:
    real = DeviceCopies.fill
    patch.setattr(
        DeviceCopies, "fill", lambda self, pages, *rest: real(self, pages[::-1].copy(), *rest)
    )


def _without_waiting(method: str) -> Plant:
    """Has a method of the resizer wait for no stream."""

    def plant(patch: MonkeyPatch) -> None:
        real = getattr(KVResizer, method)

        def instead(resizer: KVResizer, *arguments: int) -> Any:
            streams, resizer._streams = resizer._streams, Streams()
            try:
                return real(resizer, *arguments)
            finally:
                resizer._streams = streams

        patch.setattr(KVResizer, method, instead)

    return plant


def _shrunk_during_a_copy(patch: MonkeyPatch) -> None:
    patch.setattr(BlockGroupAllocator, "shrink", lambda self, blocks: self.groups.shrink(blocks))
    patch.setattr(KVResizer, "removable", property(lambda self: self.blocks - self.least))


def _unordered(kind: str) -> str:
    return f"^{kind}.* not ordered after "


FAULTS: dict[str, tuple[Plant, str]] = {
    "store before the forward ends": (_at_once("store"), _unordered("race")),
    "load before the forward ends": (_at_once("load"), _unordered("race")),
    "fill before the forward ends": (_at_once("fill"), _unordered("race")),
    "fill of tokens before the forward ends": (_at_once("fill_tokens"), _unordered("race")),
    "forward does not wait for layers": (_nothing(LayerLoads, "wait_until"), _unordered("race")),
    "forward does not wait for a fill": (_fill_goes_on, _unordered("race")),
    "forward does not wait for a fill of tokens": (_fill_tokens_goes_on, _unordered("race")),
    "forward does not wait for a swap-in": (
        _nothing(resume, "_landing", True),
        _unordered("race"),
    ),
    "forward does not wait for what it takes back": (_taken_back_at_once, _unordered("race")),
    "fence waits for nothing": (_nothing(NativeTicket, "fence"), _unordered("race")),
    "blocks are given away during a copy": (
        _nothing(BlockGroupAllocator, "_fence"),
        _unordered("race"),
    ),
    "host memory is given away during a copy": (_not_reading, _unordered("race: the host writes")),
    "host memory is not pinned": (_not_pinned, "copies of pageable memory"),
    "host memory is unregistered during a copy": (_unregister, _unordered("unregistered")),
    "host memory is freed during a copy": (_free, _unordered("freed")),
    "pages go to other blocks": (_other_blocks, "read something else than its context"),
    "memory is lent during a forward": (_without_waiting("shrink"), _unordered("race")),
    "memory is lent during a copy": (_shrunk_during_a_copy, _unordered("race")),
    "memory is returned during a forward": (_without_waiting("withdraw"), _unordered("race")),
    "memory is unmapped during a forward": (_without_waiting("withdraw"), _unordered("unmapped")),
    "memory is unmapped during a copy": (_nothing(BlocksInFlight, "wait"), "^unmapped"),
}
"""Faults by name: a function that plants the fault, and the start of the report that shows it."""
LENDING = tuple(name for name in FAULTS if name.startswith("memory is "))
"""Faults that show only where memory is lent."""
