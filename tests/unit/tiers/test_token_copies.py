"""Copies of tokens from host memory to slots of the device, without the rest of their pages."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SimulatedDevice
from tier_kit import DEADLINE_S, LAYOUTS, arena
from transfer_kit import fake_cuda

from sgl_ext.memory.slab import HostSlab
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.host import HostPages

BLOCKS, PAGES, STRIDE = 24, 12, 4096


class Recorder:
    """Engine that keeps the copies that were submitted last."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def submit(self, copies: Any, *args: Any) -> Any:
        self.copies = copies
        return self._engine.submit(copies, *args)


def check(page: int, at: Pages, slots: Pages) -> Any:
    """Copies tokens, compares the slab with its definition, and returns the copies."""
    layout = LAYOUTS[page]
    with TransferEngine() as engine:
        slab, host = HostSlab.create(layout, BLOCKS), arena(engine, PAGES, layout)
        engine.register(slab.address, slab.size, owner=slab)
        chance = np.random.default_rng(page)
        host.memory[:] = chance.integers(0, 256, host.memory.shape, np.uint8)
        tokens = np.asarray(slab.mapping)[: slab.size].reshape(-1, layout.token_bytes)
        tokens[:] = chance.integers(0, 256, tokens.shape, np.uint8)
        expected = tokens.copy()
        for place, slot in zip(at.tolist(), slots.tolist(), strict=True):
            begin = place % page * layout.token_bytes
            expected[slot] = host.memory[place // page, begin : begin + layout.token_bytes]
        recorder: Any = Recorder(engine)
        copies = DeviceCopies(recorder, engine.host_lane(), slab, host)
        copies.fill_tokens(at, slots).wait(DEADLINE_S)
        np.testing.assert_array_equal(tokens, expected)
        return recorder.copies


@given(page=st.sampled_from([1, 4]), random=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_any_tokens_reach_their_slots_and_nothing_else_changes(page: int, random: Random) -> None:
    def runs(limit: int, count: int) -> Pages:
        """Returns ``count`` different numbers, in runs of random lengths and order."""
        edges = sorted(random.sample(range(1, limit), random.randint(0, 8)))
        pieces = np.split(np.arange(limit), edges)
        random.shuffle(pieces)
        return np.concatenate(pieces)[:count]

    count = random.randint(1, PAGES * page)
    check(page, runs(PAGES * page, count), runs(BLOCKS * page, count))


def test_a_run_is_one_copy_with_a_row_for_each_whole_page() -> None:
    # Its tokens are at other offsets in their blocks than in their pages.
    copies = check(4, np.arange(6, 23), np.arange(9, 26))
    size = LAYOUTS[4].token_bytes
    assert [(width // size, height) for _, _, width, height, *_ in copies] == [
        (2, 1), (4, 3), (3, 1),
    ]  # fmt: skip
    assert len(check(1, np.arange(3, 10), np.arange(9, 16))) == 1


class Forward(Streams):
    """Streams of a simulated device on which forwards run on one stream."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def busy(self) -> tuple[int, ...]:
        return (self._handle,)

    def current(self) -> int:
        return self._handle


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("missing", ["nothing", "streams", "fence", "reading"])
def test_copies_are_ordered_with_forwards_and_with_the_next_use_of_a_page(
    seed: int, missing: str, library: Path
) -> None:
    """Copies into slots that a forward may still use, whose pages are unpinned at once.

    Without any of the three means of order, the checker finds a race.
    """
    layout = LAYOUTS[4]
    device = SimulatedDevice(library, seed)
    with TransferEngine() as engine:
        memory, host = device.memory(BLOCKS * layout.block_bytes), device.host(PAGES * STRIDE)
        for array, on_device in ((memory, True), (host, False)):
            engine.register(array.ctypes.data, array.nbytes, owner=array, device=on_device)
        slab: Any = SimpleNamespace(address=memory.ctypes.data, layout=layout, blocks=BLOCKS)
        slots: Any = SimpleNamespace(
            layout=layout, address=host.ctypes.data, stride=STRIDE, pages=PAGES
        )
        stream = device.stream()
        streams = Streams() if missing == "streams" else Forward(stream)
        lane = engine.cuda_lane(library=library)
        copies = DeviceCopies(engine, lane, slab, slots, streams=streams)
        pages = HostPages(PAGES, None if missing == "reading" else copies.reading)

        target = memory.ctypes.data + 9 * layout.token_bytes, 6 * layout.token_bytes
        device.kernel(stream, writes=[target])  # an earlier forward; its request is gone
        device.hold(copies=missing in ("fence", "reading"))
        ticket = copies.fill_tokens(np.arange(2, 8), np.arange(9, 15))
        if missing != "fence":
            ticket.fence(stream, DEADLINE_S)
        device.kernel(stream, reads=[target], writes=[target])  # rotates the keys in place
        if missing == "fence":
            device.hold()
        assert pages.reserve(PAGES) is not None
        device.host_writes(host.ctypes.data, host.nbytes)
        device.hold()
        ticket.wait(DEADLINE_S)
        device.synchronize()
        found = device.races
    device.close()
    assert bool(found) == (missing != "nothing"), found
