"""Tests of masters and workers whose KV is on a simulated CUDA device, in one process.

Each side has streams of its own, and waits only for these, as a process does. What forwards of both
sides do to the lent memory is compared by the device's race checker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scheduler_kit import Batch, Req, Scheduler
from simulated_device import Range, SimulatedDevice
from simulated_engine import PIECE
from simulated_streams import SimulatedStreams
from transfer_kit import fake_cuda

from sgl_ext.config import Peer
from sgl_ext.engine.kv.resize import KVResizer
from sgl_ext.engine.peer import master as peer_master
from sgl_ext.engine.peer import side as peer_side
from sgl_ext.engine.peer.master import MasterSide
from sgl_ext.engine.peer.power import open_side
from sgl_ext.engine.peer.side import PeerSide
from sgl_ext.engine.peer.worker import WorkerSide
from sgl_ext.memory.streams import Streams

PAGE = 16
BLOCK = PAGE * 4096
IN_A_PIECE = PIECE // BLOCK
BLOCKS = 2 * IN_A_PIECE
"""Blocks of a worker, whose padding block makes the third piece begin"""


class OwnStreams(SimulatedStreams):
    """Streams of one process, which does not see those of others."""

    def synchronize(self) -> None:
        self.release()
        for stream in (self.schedule, self.forward):
            self.device.synchronize(stream=stream)


class Engine:
    """Side, its scheduler and streams, and forwards that use blocks."""

    def __init__(self, side: PeerSide, scheduler: Scheduler, streams: Streams) -> None:
        self.side, self.scheduler, self.streams = side, scheduler, streams

    def step(self) -> None:
        self.side.step(self.scheduler.running_batch)
        self.side.planned()
        self.side.check_integrity()

    def place(self, *blocks: int) -> list[Range]:
        return [(self.scheduler.slab.address + block * BLOCK, BLOCK) for block in blocks]

    def launch(self, *blocks: int) -> None:
        """Launches a forward that reads and writes blocks, and does not begin at once."""
        assert isinstance(self.streams, OwnStreams)
        places = self.place(*blocks)
        self.streams.hold()
        with self.streams.forwarding():
            self.streams.device.kernel(self.streams.current(), places, places, fill=1)

    def blocks_of(self, req: Req) -> list[int]:
        row = self.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        return sorted({slot // PAGE for slot in row[: req.kv.kv_allocated_len].tolist()})

    def begin(self, rid: str, tokens: int) -> Req:
        req = Req(rid, tokens)
        self.scheduler.extend(req, tokens)
        self.scheduler.running_batch = Batch(
            self.scheduler, *self.scheduler.running_batch.reqs, req
        )
        return req


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(fake_cuda(tmp_path_factory.mktemp("cuda")))
    yield device
    device.close()


Open = Callable[..., Engine]


@pytest.fixture
def opened(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """Yields a function that opens a side, on the device or in host memory."""
    engines: list[Engine] = []

    def open_(role: str, *, host: bool = False, **options: object) -> Engine:
        library = None if host else str(device.fake._name)
        blocks, beyond = (20, 8 * IN_A_PIECE) if role == "master" else (BLOCKS, 0)
        scheduler = Scheduler(PAGE, blocks, beyond, library)
        if role == "master":
            options["capacity"] = beyond * BLOCK
        else:
            options |= {"window": "10ms", "granularity": "block"}
        section = {"role": role, "directory": str(tmp_path / "peers"), **options}
        config = Peer.model_validate({"deadline": "60s", "lease": "60s", **section})
        streams = Streams() if host else OwnStreams(device)
        with monkeypatch.context() as patch:
            patch.setattr(peer_side, "streams_of", lambda *_: streams)
            side = open_side(config, scheduler, scheduler.slab)
        engines.append(Engine(side, scheduler, streams))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.side._link.close()
        if isinstance(engine.side, WorkerSide) and engine.side._descriptors is not None:
            engine.side._descriptors.close()
    device.reset()


def together(engines: list[Engine], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        for engine in engines:
            engine.step()
        time.sleep(0.01)


def sides(*engines: Engine) -> tuple[WorkerSide, MasterSide]:
    worker, master = (engine.side for engine in engines)
    assert isinstance(worker, WorkerSide)
    assert isinstance(master, MasterSide)
    return worker, master


def pair(opened: Open) -> tuple[Engine, Engine]:
    """Returns a worker that has lent all it may, and its master, which uses that."""
    engines = opened("worker"), opened("master")
    engines[0].scheduler.slab.tensor().fill_(float("nan"))
    worker, master = sides(*engines)
    together(
        [*engines],
        lambda: 0 < worker._worker.used == worker._memory.size == master._master.borrowed,
    )
    return engines


def test_whole_pieces_change_hands(opened: Open, device: SimulatedDevice) -> None:
    lender, borrower = pair(opened)
    worker, master = sides(lender, borrower)
    assert worker._memory.size == 2 * PIECE
    assert worker.blocks == IN_A_PIECE - 1
    (loan,) = master._master.loans
    assert loan.region is not None
    region, slab = loan.region, borrower.scheduler.slab
    there = lender.scheduler.slab.tensor()[IN_A_PIECE : IN_A_PIECE + 2]
    here = slab.tensor()[region.first : region.first + 2]
    assert not here.any()
    here[:] = torch.arange(here.numel()).view(here.shape)
    assert torch.equal(there, here)
    lender.scheduler.waiting_queue = [Req("large", BLOCKS * PAGE - 34)]
    together([lender, borrower], lambda: worker.blocks == BLOCKS)
    assert master._master.borrowed == 0
    assert worker._worker.counts.replaced == 0
    assert not there.any()
    device.assert_no_races()


def test_memory_that_is_mapped_but_not_lent_keeps_the_workers_kv(opened: Open) -> None:
    """A master maps all pieces that a worker may lend, and uses those that it is granted."""
    lender, borrower = opened("worker"), opened("master")
    _, master = sides(lender, borrower)
    kept = lender.begin("kept", (IN_A_PIECE + 10) * PAGE)
    blocks = lender.blocks_of(kept)
    assert max(blocks) > IN_A_PIECE  # the first piece that may be lent is in use
    kv = lender.scheduler.slab.tensor()[blocks]
    kv.fill_(7)
    lender.scheduler.slab.tensor()[blocks] = kv
    together([lender, borrower], lambda: master._master.borrowed >= PIECE)
    (loan,) = master._master.loans
    assert loan.region is not None
    assert loan.region.size == 2 * PIECE
    assert (lender.scheduler.slab.tensor()[blocks] == 7).all()


def test_a_worker_lends_what_its_capacity_allows(opened: Open) -> None:
    side = opened("worker", capacity=PIECE).side
    assert isinstance(side, WorkerSide)
    assert side._memory.size == PIECE
    assert side._memory.end == 3 * PIECE


@pytest.mark.parametrize("host", ["worker", "master"])
def test_memory_of_another_kind_is_refused(opened: Open, host: str) -> None:
    engines = [opened(role, host=role == host) for role in ("worker", "master")]
    worker, master = sides(*engines)
    gpu, ram = "memory of the GPU GPU-simulated", "host memory"
    lends, has = (ram, gpu) if host == "worker" else (gpu, ram)
    reason = (
        f"the worker lends {lends}, but this master has its KV in {has}; run both on GPUs, or "
        "both on the CPU"
    )
    together(engines, lambda: worker.describe()["refused"] == reason)
    (loan,) = master.describe()["workers"]  # type: ignore[misc]
    assert loan["refused"] == reason  # type: ignore[index]
    for _ in range(5):
        time.sleep(0.02)
        for engine in engines:
            engine.step()
    assert (worker._worker.lent, master._master.borrowed) == (0, 0)


@pytest.mark.parametrize("reason", ["", "no path between the GPUs"])
def test_memory_of_another_gpu_is_used_if_it_can_be_accessed(
    opened: Open, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    asked = []

    def unreachable(device: int, uuid: str) -> str:
        asked.append((device, uuid))
        return reason

    monkeypatch.setattr(peer_master, "unreachable", unreachable)
    engines = [opened("worker"), opened("master")]
    worker, master = sides(*engines)
    worker._worker._lender._gpu = "GPU-other"
    if reason:
        together(engines, lambda: worker.describe()["refused"] == reason)
        assert master._master.borrowed == 0
    else:
        together(engines, lambda: master._master.borrowed == 2 * PIECE)
    assert asked == [(0, "GPU-other")]


def without_waiting(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Plants a fault: a method of the resizer does not wait for the device."""
    real = getattr(KVResizer, method)

    def instead(resizer: KVResizer, *arguments: int) -> object:
        streams, resizer._streams = resizer._streams, Streams()
        try:
            return real(resizer, *arguments)
        finally:
            resizer._streams = streams

    monkeypatch.setattr(KVResizer, method, instead)


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_lent_during_a_forward_that_uses_it(
    opened: Open, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A finished request is part of one more forward, which still writes its blocks."""
    lender, borrower = opened("worker"), opened("master")
    _, master = sides(lender, borrower)
    ended = lender.begin("ended", BLOCKS * PAGE - 100)
    lender.step()
    lender.launch(*lender.blocks_of(ended))
    if not waits:
        without_waiting(monkeypatch, "shrink")
    lender.scheduler.release(ended)
    lender.scheduler.running_batch = Batch(lender.scheduler)
    together([lender, borrower], lambda: master._master.borrowed == 2 * PIECE)
    req = borrower.begin("borrows", 50 * PAGE)
    borrower.launch(*borrower.blocks_of(req))
    borrower.streams.synchronize()
    if waits:
        device.assert_no_races()
    else:
        assert any("not ordered after" in text for text in device.races)


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_returned_during_a_forward_that_uses_it(
    opened: Open, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A request is retracted while its forward reads and writes borrowed blocks."""
    lender, borrower = pair(opened)
    worker, master = sides(lender, borrower)
    req = borrower.begin("borrows", 50 * PAGE)
    borrowed = [block for block in borrower.blocks_of(req) if block > 20]
    assert borrowed
    borrower.launch(*borrowed)
    if not waits:
        without_waiting(monkeypatch, "withdraw")
        monkeypatch.setattr(master, "_streams", Streams())
    lender.scheduler.waiting_queue = [Req("large", BLOCKS * PAGE - 34)]
    together([lender, borrower], lambda: worker.blocks == BLOCKS)
    assert borrower.scheduler.waiting_queue == [req]
    lender.launch(*range(IN_A_PIECE, BLOCKS + 1))
    lender.streams.synchronize()
    if waits:
        borrower.streams.synchronize()
        device.assert_no_races()
    else:
        assert any("not ordered after" in text for text in device.races)


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_unmapped_during_a_forward_that_reads_it(
    opened: Open, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    lender, borrower = pair(opened)
    _, master = sides(lender, borrower)
    (loan,) = master._master.loans
    assert loan.region is not None
    region = loan.region
    borrower.launch(region.first)
    if not waits:
        without_waiting(monkeypatch, "withdraw")
        monkeypatch.setattr(master, "_streams", Streams())
    loan.process = SimpleNamespace(alive=lambda: False)  # type: ignore[assignment]
    borrower.step()
    assert not master._master.loans
    assert region.offset not in borrower.scheduler.slab.mapping.pieces  # type: ignore[attr-defined]
    if waits:
        device.assert_no_races()
    else:
        assert any(text.startswith("unmapped") for text in device.races)


def test_a_late_master_keeps_what_it_has_mapped(opened: Open, device: SimulatedDevice) -> None:
    """After the deadline the worker puts other memory in place; the master's forward goes on."""
    lender, borrower = opened("worker", deadline="50ms"), opened("master")
    worker, master = sides(lender, borrower)
    together([lender, borrower], lambda: master._master.borrowed == 2 * PIECE)
    req = borrower.begin("borrows", 50 * PAGE)
    borrower.launch(*borrower.blocks_of(req))
    lender.scheduler.waiting_queue = [Req("large", BLOCKS * PAGE - 34)]
    together([lender], lambda: worker.blocks == BLOCKS)
    assert worker._worker.counts.replaced == 1
    assert worker._memory.retired == 2 * PIECE
    lender.launch(*range(IN_A_PIECE, BLOCKS + 1))
    lender.streams.synchronize()
    together([lender, borrower], lambda: worker._memory.retired == 0)
    borrower.streams.synchronize()
    device.assert_no_races()


def test_a_closed_worker_hands_over_nothing(opened: Open) -> None:
    lender, borrower = pair(opened)
    worker, master = sides(lender, borrower)
    worker.close()
    assert worker._descriptors is not None
    assert not worker._descriptors._thread.is_alive()
    together([borrower], lambda: not master._master.borrowed)


def test_freed_slots_that_have_not_landed_are_waited_for(opened: Open) -> None:
    """Slots freed on a device come to the host later; the blocks behind them count as free."""
    side = opened("worker").side
    allocator = side._resizer._allocator
    slots = allocator.alloc(BLOCKS * PAGE)
    assert slots is not None
    allocator.device = "cuda"  # its tensors are the host's
    allocator.free_page_ids(slots[::PAGE] // PAGE)
    assert allocator.groups.tail_free == 0
    assert side._resizer.tail_free == BLOCKS
