"""Tests of which side uses lent memory, with master and worker in one process and on one clock."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace
from peer_kit import MASTER, WORKER, LightMaster, LightWorker

from sgl_ext.memory.mapping import PAGE
from sgl_ext.peer.messages import ProtocolError, decode
from sgl_ext.peer.worker import Terms

TERMS = Terms(granularity="block", window=20, interval=1, deadline=5, lease=10)
BLOCKS = 60


class Alive:
    """Fake process; a test sets whether it is dead."""

    dead = False

    def alive(self) -> bool:
        return not self.dead


class Lives(list[Alive]):
    """Factory of fake processes, which lists them in order of creation."""

    def __call__(self, pid: int) -> Alive:
        self.append(Alive())
        return self[-1]


class Pair:
    """Master and worker whose messages arrive at once, or not at all while ``deaf`` is set."""

    def __init__(self, terms: Terms = TERMS, beyond: int = 400) -> None:
        self.master_lives, self.worker_lives = Lives(), Lives()
        self.master = LightMaster(20, beyond, lease=10, process=self.worker_lives)
        self.worker = LightWorker(BLOCKS, terms, process=self.master_lives)
        self.now = 0.0
        self.deaf = False

    def step(self, seconds: float = 1.0, times: int = 1) -> None:
        for _ in range(times):
            self.now += seconds
            self.worker.step(self.now)
            if not self.deaf:
                self.master.master.receive(self.worker.worker.message, self.now)
            self.master.master.step(self.now)
            if not self.deaf:
                for keep in self.master.master.messages():
                    self.worker.worker.receive(keep, self.now)
            self.check()

    def check(self) -> None:
        for light in (self.worker, self.master):
            light.check_integrity()
            for owner in light.requests:
                light.check(owner)

    @property
    def lent(self) -> int:
        return self.worker.worker.lent


def test_an_idle_worker_lends_all_lendable_memory() -> None:
    pair = Pair()
    pair.step(times=4)
    assert pair.lent == pair.worker.memory.size
    assert pair.worker.worker.used == pair.lent
    assert pair.worker.blocks == 1
    assert pair.master.groups.blocks == 20 + pair.lent // MASTER.block_bytes
    assert pair.master.begin(70)  # more blocks than its own 20


def test_a_worker_that_is_no_process_here_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()
    pair.master.master._process_of = lambda _pid: SimpleNamespace(alive=lambda: False)
    pair.step(times=6)
    assert pair.worker.worker.used == 0
    (record,) = caplog.records
    assert "does not exist here, so that none is borrowed" in record.getMessage()


def test_check_integrity_detects_blocks_in_use_on_both_sides() -> None:
    pair = Pair()
    pair.step(times=4)
    (loan,) = pair.master.master.loans
    loan.first -= 1
    with pytest.raises(AssertionError, match="are used, from"):
        pair.master.master.check_integrity()
    pair.worker.grow(1)
    with pytest.raises(AssertionError, match="the pool has 2 blocks, 1 are not lent"):
        pair.worker.worker.check_integrity()


def test_a_worker_that_has_requests_is_busy() -> None:
    pair = Pair()
    pair.step(times=4)
    assert not pair.master.master.worker_busy
    assert pair.worker.begin(1)
    pair.step()
    assert pair.master.master.worker_busy
    pair.worker.end(next(iter(pair.worker.requests)))
    pair.step()
    assert not pair.master.master.worker_busy
    pair.worker.wanted = BLOCKS  # all lent memory is reclaimed
    pair.step(times=4)
    assert pair.lent == 0
    assert not pair.master.master.worker_busy


def test_a_worker_reclaims_the_memory_that_it_needs() -> None:
    pair = Pair()
    pair.step(times=4)
    while pair.master.begin(10):
        pass
    before = pair.master.groups.blocks
    pair.worker.wanted = 30
    pair.step(times=2)
    assert pair.worker.held == 30
    assert pair.master.groups.blocks < before
    assert pair.master.requests  # requests in the other blocks stay
    pair.worker.end(next(iter(pair.worker.requests)))
    pair.step(times=25)  # a past need is expected to recur for 20 s
    assert pair.master.groups.blocks == before


def test_memory_that_the_master_does_not_return_in_time_is_replaced() -> None:
    pair = Pair()
    pair.step(times=4)
    while pair.master.begin(10):
        pass
    pair.master.slow = True
    pair.worker.wanted = 30
    pair.step(times=4)
    assert pair.worker.held == 0
    pair.step(times=4)
    assert pair.worker.held == 30
    assert pair.worker.worker.counts.replaced == 1
    assert pair.worker.memory.retired > 0
    pair.step(times=10)
    assert pair.lent == 0  # nothing is lent while the replaced memory is in use
    pair.master.slow = False
    pair.step(times=4)
    assert pair.worker.memory.retired == 0
    assert pair.master.groups.blocks >= 20
    pair.worker.end(next(iter(pair.worker.requests)))
    pair.step(times=30)
    assert pair.lent == pair.worker.memory.size


def test_a_paused_master_returns_reclaimed_memory_when_it_resumes() -> None:
    pair = Pair()
    pair.step(times=4)
    while pair.master.begin(10):
        pass
    pair.deaf = True
    for _ in range(11):  # the paused master makes no steps
        pair.now += 1
        pair.worker.step(pair.now)
    assert pair.lent == 0
    assert pair.worker.blocks == BLOCKS
    assert pair.worker.begin(BLOCKS)
    pair.check()
    pair.deaf = False
    pair.step(times=4)
    assert pair.worker.memory.retired == 0
    assert pair.master.groups.blocks == 20


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_the_master_returns_memory_of_a_dead_or_silent_worker(how: str) -> None:
    pair = Pair()
    pair.step(times=4)
    while pair.master.begin(10):
        pass
    if how == "dead":
        pair.worker_lives[0].dead = True
        pair.master.master.step(pair.now)
        assert not pair.master.master.loans
    else:
        pair.master.master.step(pair.now + 10.5)
        assert pair.master.master.borrowed == 0
    assert pair.master.groups.blocks == 20
    pair.check()
    if how == "silent":
        pair.step(12)  # the lease has expired for the worker, too
        pair.step(times=4)
        assert pair.lent == pair.worker.memory.size


def test_the_memory_of_a_dead_master_is_reclaimed_at_once() -> None:
    pair = Pair()
    pair.step(times=4)
    pair.master_lives[0].dead = True
    pair.now += 0.1
    pair.worker.step(pair.now)
    assert pair.worker.blocks == BLOCKS
    assert pair.worker.worker.counts.replaced == 0


def test_a_new_master_takes_over_without_harm_to_old_requests() -> None:
    pair = Pair()
    pair.step(times=4)
    while pair.master.begin(10):
        pass
    old = pair.master
    pair.master = LightMaster(20, 400, lease=10, process=pair.worker_lives)
    pair.step(times=4)
    assert pair.lent == pair.worker.memory.size
    while pair.master.begin(10):
        pass
    pair.check()
    for owner in old.requests:  # it counts as alive, so its memory was replaced
        old.check(owner)
    assert pair.worker.memory.retired > 0
    pair.master_lives[0].dead = True
    pair.worker.step(pair.now)
    assert pair.worker.memory.retired == 0


def test_all_memory_is_returned_when_either_side_closes() -> None:
    pair = Pair()
    pair.step(times=4)
    pair.worker.worker.close()
    pair.step(times=2)
    assert pair.lent == 0
    assert pair.worker.blocks == BLOCKS
    pair = Pair()
    pair.step(times=4)
    pair.master.master.close()
    pair.step(times=2)
    assert pair.master.master.borrowed == 0


def test_a_restarted_master_is_lent_memory_at_once() -> None:
    """The master that closes refuses memory, for as long as needs are expected to recur."""
    pair = Pair()
    pair.step(times=4)
    pair.master.master.close()
    pair.step(times=3)
    assert pair.lent == 0
    assert "shutting down" in pair.worker.worker.refused
    pair.master_lives[0].dead = True
    pair.master = LightMaster(20, 400, lease=10, process=pair.worker_lives)
    pair.step(times=4)
    assert pair.lent == pair.worker.memory.size
    assert pair.worker.worker.refused == ""


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 100), (1, 8 * PAGE), (-PAGE, 8 * PAGE), (8 * PAGE, -PAGE)]
)
def test_lent_memory_that_is_not_whole_pages_is_refused(offset: int, size: int) -> None:
    pair = Pair()
    master, name = pair.master.master, b""
    for number in (0, 1):  # a worker lends only after the master has answered
        lend = replace(pair.worker.worker.message, worker=b"other", master=name, number=number)
        plain = msgspec.to_builtins(lend, builtin_types=(bytes,))
        plain["memory"] = [["other", 3, offset, size]]
        plain["size"] = number * max(size, 0)
        with pytest.raises(ProtocolError, match=r"invalid message: .* expected whole pages"):
            master.receive(decode(msgspec.msgpack.encode(plain)), pair.now)
        master.step(pair.now)
        name = next((keep.master for keep in master.messages()), b"")
    assert master.borrowed == 0


def test_workers_are_limited_in_number_and_forgotten_when_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()
    pair.step(times=4)
    lent = pair.lent
    assert lent
    invented = replace(pair.worker.worker.message, master=b"", number=0, size=0)
    for number in range(5000):
        pair.master.master.receive(replace(invented, worker=b"%d" % number), pair.now)
    assert len(pair.master.master.loans) == 64
    assert len(pair.worker_lives) == 64  # a real process object holds a descriptor
    (record,) = caplog.records
    assert "64 workers lend to this master" in record.getMessage()
    pair.step(times=4)
    assert pair.lent == lent
    pair.step(times=12)  # the leases of silent workers expire
    assert len(pair.master.master.loans) == 1
    assert pair.lent == lent


def test_a_master_without_addresses_refuses_with_the_reason() -> None:
    pair = Pair(beyond=1)
    pair.step(times=4)
    assert pair.lent == 0
    assert pair.worker.blocks == BLOCKS
    assert "raise its peer.capacity" in pair.worker.worker.refused
    pair.step(times=30)
    assert pair.worker.blocks == BLOCKS
    assert pair.worker.worker.counts.replaced == 0


def test_a_master_borrows_up_to_its_capacity() -> None:
    pair = Pair(beyond=40)
    pair.step(times=4)
    assert 80 << 10 < pair.lent <= 40 * MASTER.block_bytes
    assert pair.worker.worker.used == pair.lent
    while pair.master.begin(4):
        pass
    pair.worker.wanted = 50
    pair.step(times=3)
    assert pair.worker.held == 50


def test_a_refusal_of_an_earlier_grant_is_ignored() -> None:
    pair = Pair(beyond=1)
    pair.step(times=2)
    (keep,) = pair.master.master.messages()
    assert "capacity" in keep.refused
    pair.master = LightMaster(20, 400, lease=10, process=pair.worker_lives)
    pair.step(times=30)
    worker = pair.worker.worker
    assert pair.lent == pair.worker.memory.size
    (now_keep,) = pair.master.master.messages()
    old = replace(now_keep, number=now_keep.number - 1, refused="addresses are full")
    worker.receive(old, pair.now)
    pair.step()
    assert pair.lent == pair.worker.memory.size


def test_memory_is_lent_again_if_the_need_falls_during_a_reclaim() -> None:
    """Checks that reclaimed blocks are in the pool before the same step lends more."""
    pair = Pair(Terms(granularity="block", window=2, interval=1, deadline=50, lease=100))
    pair.step(times=4)
    while pair.master.begin(10):
        pass
    pair.master.slow = True
    pair.worker.wanted = 50
    pair.step()
    pair.worker.wanted = 0
    pair.step(times=4)
    pair.master.slow = False
    pair.step(times=6)
    assert pair.lent == pair.worker.memory.size


def test_a_master_that_meets_each_of_many_reclaims_is_not_late() -> None:
    pair = Pair(Terms(granularity="block", window=99, interval=1, deadline=5, lease=100))
    pair.step(times=4)
    while pair.master.begin(2):
        pass
    for blocks in range(1, 50):
        pair.worker.wanted = blocks
        # The worker reclaims again before the master answers.
        pair.worker.worker.step(blocks * WORKER.page, pair.now)
        pair.step(0.25)
        for owner in list(pair.worker.requests):
            pair.worker.end(owner)
    assert pair.worker.worker.counts.replaced == 0


def test_granularity_unit_lends_whole_units() -> None:
    pair = Pair(Terms(granularity="unit", window=20, interval=1, deadline=5, lease=10))
    pair.step(times=4)
    unit = 60 << 10  # common multiple of blocks of 3 and 5 KiB, and of pages
    assert pair.lent == pair.worker.memory.size // unit * unit
    assert unit % WORKER.block_bytes == unit % MASTER.block_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_events_keep_the_data_of_all_requests(seed: int) -> None:
    """Runs requests on both sides with lost messages, pauses and new masters, and checks data."""
    choose = random.Random(seed)  # noqa: S311
    pair = Pair()
    pair.worker.choose.seed(seed)
    pair.master.choose.seed(seed + 100)
    most = 0
    for _ in range(400):
        pair.deaf = choose.random() < 0.3
        pair.master.slow = choose.random() < 0.3
        if not pair.worker.wanted and choose.random() < 0.3:
            pair.worker.wanted = choose.randrange(1, 40)
        pair.worker.serve(8)
        pair.master.serve(30)
        if choose.random() < 0.1:  # the master is paused
            for _ in range(choose.randrange(15)):
                pair.now += 1
                pair.worker.step(pair.now)
        if choose.random() < 0.02:
            pair.master = LightMaster(20, 400, lease=10, seed=seed, process=pair.worker_lives)
            for lives in pair.master_lives:
                lives.dead = choose.random() < 0.8
        pair.step(choose.choice([0.1, 1, 3]))
        most = max(most, pair.master.groups.blocks)
    pair.deaf = pair.master.slow = False
    for owner in list(pair.worker.requests):
        pair.worker.end(owner)
    pair.worker.wanted = 0
    pair.step(times=60)
    for lives in pair.master_lives[:-1]:
        lives.dead = True
    pair.step()
    assert pair.lent == pair.worker.memory.size
    assert pair.worker.memory.retired == 0
    assert most > 40
