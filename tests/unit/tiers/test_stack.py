"""Tier stack with real copies between a slab and an arena, and a tier that the test controls."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from stack_kit import BLOCKS, Machine
from tier_kit import content, keys, places

from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.tiers.layer_loads import LayerLoads, layer_groups


@pytest.fixture(params=[1, 4])
def page(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@pytest.fixture
def machine(page: int) -> Iterator[Machine]:
    machine = Machine(page, 16)
    yield machine
    machine.check_integrity()
    machine.close()


def given(machine: Machine, rid: str) -> dict[str, int]:
    """Returns the pages that each tier contributed to the request's load, without zeros."""
    restored, layout = machine.stack.loads.take_restored(rid), machine.layout
    pages = {name: each["tokens"] // layout.page for name, each in restored.items()}
    for name, each in restored.items():
        assert each["bytes"] == pages[name] * layout.block_bytes
        assert each["seconds"] > 0
    return {name: count for name, count in pages.items() if count}


class Late:
    """Ticket whose copy ends when the test sets ``ended``."""

    seconds = 0.5
    ended = False

    def wait(self, _seconds: float) -> None:
        if not self.ended:
            raise TimeoutError

    def fence(self, _stream: int | None, seconds: float) -> None:
        self.wait(seconds)

    def poll(self) -> bool:
        return self.ended


def test_a_late_load_does_not_count_as_landed() -> None:
    ticket = Late()
    loads = LayerLoads([(0, 1)], deadline=0.0)
    index = loads.start([ticket])  # type: ignore[list-item]
    for _ in range(2):
        with pytest.raises(TimeoutError):
            loads.finish(index)
    ticket.ended = True
    assert loads.finish(index) == 0.5


def test_a_load_that_the_forward_did_not_wait_for_has_not_landed_for_it() -> None:
    ticket = Late()
    loads = LayerLoads([(0, 1)], deadline=0.0)
    for read, seconds in ((True, None), (False, 0.5)):
        index = loads.start([ticket])  # type: ignore[list-item]
        ticket.ended = False
        loads.set_consumer(index)
        if read:
            loads.wait_until(0)
        ticket.ended = True
        assert loads.finish(index) == seconds


def test_layer_groups_grow_and_cover_all_layers() -> None:
    assert list(layer_groups(30)) == [(0, 1), (1, 3), (3, 7), (7, 15), (15, 30)]
    assert list(layer_groups(4)) == [(0, 1), (1, 4)]
    assert list(layer_groups(1)) == [(0, 1)]
    for layers in range(1, 100):
        groups = list(layer_groups(layers))
        assert [begin for begin, _ in groups[1:]] == [end for _, end in groups[:-1]]
        assert groups[-1][1] == layers


def test_stored_pages_are_loaded_into_other_blocks_layer_by_layer(machine: Machine) -> None:
    names = keys(*range(9))
    assert machine.store(names, places(3, 4, 5, 20, 21, 8, 40, 39, 10))
    assert machine.prefixes.lookup("r", [*names, *keys(99)]) == 9
    assert machine.load("r", names, places(50, 51, 52, 53, 7, 6, 30, 31, 1))
    assert given(machine, "r") == {"host": 9}
    assert machine.stack.loads.take_restored("r") == {}


def test_loads_of_one_batch_start_as_one_load(machine: Machine) -> None:
    machine.store(keys(1, 2, 3), places(1, 2, 3))
    assert machine.prefixes.load("a", keys(1, 2), places(11, 12))
    assert machine.prefixes.load("b", keys(1, 3), places(13, 14))
    assert machine.prefixes.load("c", keys(1), places(15))
    assert machine.prefixes.cancel("c")
    assert not machine.prefixes.cancel("c")
    assert machine.stack.loads.finish(machine.stack.loads.start())
    assert machine.right(keys(1, 2, 1, 3), places(11, 12, 13, 14))
    assert machine.stack.loads.start() == -1


def test_a_request_waits_for_pages_of_lower_tiers(machine: Machine) -> None:
    names = keys(*range(8))
    machine.store(names[:3], places(1, 2, 3))
    machine.shelve(names[2:6])
    machine.shelf.open.clear()
    assert machine.prefixes.lookup("r", names) == 3
    assert machine.prefixes.lookup("r", names) == 3  # a second lookup starts no second load
    assert not machine.prefixes.ready("r")
    assert machine.planner.pending()
    machine.shelf.open.set()
    machine.settle("r")
    assert machine.prefixes.lookup("r", names) == 6
    assert machine.load("r", names[:6], places(*range(40, 46)))
    assert given(machine, "r") == {"host": 3, "shelf": 3}
    assert machine.shelf.loads == 1


def test_pages_that_the_device_has_evicted_meanwhile_are_loaded_too(machine: Machine) -> None:
    names, page = keys(*range(8)), machine.layout.page
    machine.shelve(names)
    assert machine.prefixes.lookup("r", names[4:], 4 * page) == 0
    machine.settle("r")
    assert machine.prefixes.lookup("r", names[4:], 4 * page) == 4
    assert machine.prefixes.lookup("r", names) == 0
    machine.settle("r")
    assert machine.prefixes.lookup("r", names) == 8
    assert machine.load("r", names, places(*range(40, 48)))


def test_uses_of_pages_on_the_device_are_counted(machine: Machine) -> None:
    machine.store(keys(1, 2, 3), places(1, 2, 3))
    machine.stack.used(keys(1, 2, 9), 2)
    machine.until(lambda: set(machine.shelf.pages) == set(keys(1, 2)))
    machine.store(keys(*range(20, 33)), places(*range(20, 33)))
    machine.until(lambda: machine.stack.host.room == 16)
    assert machine.store(keys(40), places(4))  # evicts the least recently used page
    assert machine.stack.host.present(keys(1, 2, 3)) == keys(1, 2)


def test_waiting_requests_leave_room_for_preempted_ones() -> None:
    """Lets loads take all slots except the spare ones.

    Landed pages are given up, those of the newest request first, and are loaded again.
    """
    machine = Machine(4, 16, spare=2)
    first, second = keys(*range(6)), keys(*range(20, 40))
    machine.shelve([*first, *second])
    for rid, names in (("a", first), ("b", second)):
        machine.prefixes.lookup(rid, names)
        machine.until(lambda: not machine.planner.pending())
    assert machine.stack.host.room == 2
    machine.stack.make_room(2)
    assert (machine.prefixes.lookup("a", first), machine.stack.host.room) == (6, 2)
    machine.stack.make_room(3)
    assert machine.stack.host.room == 10  # b's eight pages may be evicted, a's six stay
    assert machine.prefixes.lookup("b", second) == 8
    machine.until(lambda: not machine.planner.pending())
    machine.stack.make_room(16)
    assert machine.stack.host.room == 16
    assert machine.stack.stores.save(places(1)) is not None


def test_a_request_does_not_wait_for_slots_that_it_pins_itself() -> None:
    machine = Machine(4, 16, spare=2)
    names = keys(*range(18))
    machine.store(names[:14], places(*range(14)))
    machine.shelve(names[14:])
    assert machine.prefixes.lookup("r", names) == 14
    machine.until(lambda: not machine.planner.pending())
    assert machine.prefixes.lookup("r", names) == 16


def test_giving_up_pages_does_not_extend_the_wait_of_a_request() -> None:
    machine = Machine(4, 16, wait=1000.0)
    names = keys(*range(6))
    machine.store(names[:2], places(1, 2))
    machine.shelve(names)
    machine.shelf.open.clear()
    planner, name = machine.planner, ("prefix", "r")
    machine.prefixes.lookup("r", names)
    assert not machine.prefixes.ready("r")
    deadline = planner._deadlines._until[name]
    assert planner.give_up_one()
    assert machine.prefixes.ready("r")
    machine.prefixes.lookup("r", names)
    assert not machine.prefixes.ready("r")
    assert planner._deadlines._until[name] == deadline
    planner.give_up_one()
    machine.prefixes.forget("r")
    machine.prefixes.lookup("r", names)
    assert name not in planner._deadlines
    machine.shelf.open.set()


@pytest.mark.parametrize("lands", [False, True])
def test_requests_that_do_not_wait_any_longer_for_their_pages_are_counted(lands: bool) -> None:
    machine = Machine(4, 16, wait=1000.0 if lands else 0.0)
    names = keys(*range(6))
    machine.shelve(names)
    machine.shelf.open.clear()
    machine.prefixes.lookup("r", names)
    if lands:
        assert not machine.prefixes.ready("r")
        machine.shelf.open.set()
        machine.until(lambda: not machine.planner.pending())
    machine.until(lambda: machine.prefixes.ready("r"))
    assert machine.prefixes.ready("r")
    machine.prefixes.forget("r")  # as when it is admitted
    assert machine.planner.late == (0 if lands else 1)
    machine.shelf.open.set()


def test_a_request_does_not_wait_if_lower_tiers_have_no_pages(machine: Machine) -> None:
    assert machine.prefixes.lookup("r", keys(1, 2)) == 0
    assert machine.prefixes.ready("r")


def test_a_page_that_fails_to_load_ends_the_loadable_prefix(machine: Machine) -> None:
    names = keys(*range(6))
    machine.shelve(names)
    machine.shelf.lost = {names[3]}
    machine.prefixes.lookup("r", names)
    machine.settle("r")
    assert machine.prefixes.lookup("r", names) == 3  # pages after a gap are of no use
    assert machine.prefixes.ready("r")  # it does not wait a second time
    assert machine.load("r", names[:3], places(1, 2, 3))
    assert machine.shelf.loads == 1
    machine.check_integrity()
    assert machine.stack.host.free == 13


def test_a_tier_that_raises_is_a_miss(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.shelve(keys(1))

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the tier's own")

    monkeypatch.setattr(machine.shelf, "load", fail)
    machine.prefixes.lookup("r", keys(1))
    machine.settle("r")
    assert machine.prefixes.lookup("r", keys(1)) == 0
    assert machine.stack.host.free == 16


def test_two_requests_for_the_same_pages_load_them_once(machine: Machine) -> None:
    names = keys(*range(6))
    machine.shelve(names)
    machine.shelf.open.clear()
    machine.prefixes.lookup("a", names[:4])
    machine.prefixes.lookup("b", names)
    assert not machine.prefixes.ready("b")
    machine.shelf.open.set()
    machine.settle("a")
    machine.settle("b")
    assert machine.prefixes.lookup("b", names) == 4  # the load of the rest begins
    machine.settle("b")
    assert machine.prefixes.lookup("b", names) == 6
    assert machine.load("a", names[:4], places(1, 2, 3, 4))
    assert machine.load("b", names, places(5, 6, 7, 8, 9, 10))
    assert machine.shelf.loads == 2


def test_a_request_is_held_back_for_a_limited_time(page: int) -> None:
    machine = Machine(page, 16, wait=0.05)
    machine.shelve(keys(1, 2))
    machine.shelf.open.clear()
    machine.prefixes.lookup("r", keys(1, 2))
    machine.settle("r")
    assert machine.prefixes.lookup("r", keys(1, 2)) == 0
    assert not machine.prefixes.load("r", keys(1, 2), places(1, 2))
    machine.shelf.open.set()
    machine.until(lambda: machine.stack.host.lookup(keys(1, 2)) == 2)  # for later requests
    machine.close()


def test_landed_pages_of_a_waiting_request_are_not_evicted(machine: Machine) -> None:
    """Keeps landed pages of one request while pages of another one are loaded."""
    mine, others = keys(*range(8)), keys(*range(100, 112))
    machine.shelve([*mine, *others])
    machine.prefixes.lookup("mine", mine)
    machine.settle("mine")
    machine.prefixes.lookup("other", others)
    machine.until(lambda: machine.stack.host.room == 0)
    assert machine.prefixes.lookup("mine", mine) == 8
    machine.prefixes.forget("mine")
    machine.prefixes.forget("other")
    machine.until(lambda: machine.stack.host.room == 16)


def test_a_forgotten_request_leaves_no_pinned_pages(machine: Machine) -> None:
    machine.shelve(keys(1, 2, 3))
    machine.shelf.open.clear()
    machine.prefixes.lookup("r", keys(1, 2, 3))
    assert machine.stack.host.free == 13
    machine.prefixes.forget("r")
    assert machine.prefixes.ready("r")
    machine.shelf.open.set()
    machine.until(lambda: machine.stack.host.lookup(keys(1, 2, 3)) == 3)
    assert machine.stack.host.room == 16


@pytest.mark.parametrize("keep_after", [1, 2])
def test_pages_are_demoted_after_the_configured_number_of_uses(page: int, keep_after: int) -> None:
    machine = Machine(page, 32, keep_after=keep_after)
    machine.store(keys(1, 2, 3), places(1, 2, 3))
    machine.until(lambda: len(machine.shelf.pages) == (3 if keep_after == 1 else 0))
    assert machine.load("r", keys(1, 2), places(4, 5))
    machine.until(lambda: len(machine.shelf.pages) == (3 if keep_after == 1 else 2))
    for key, stored in machine.shelf.pages.items():
        size = machine.layout.block_bytes
        assert stored[:size] == content(key, machine.layout).tobytes()
    machine.close()


def test_pages_that_a_tier_has_lost_are_stored_again_when_they_are_used(page: int) -> None:
    machine = Machine(page, 32, keep_after=1)
    machine.store(keys(1, 2), places(1, 2))
    machine.until(lambda: len(machine.shelf.pages) == 2)
    machine.shelf.pages.clear()  # such as a distributed store that was restarted
    assert machine.load("r", keys(1, 2), places(4, 5))  # the second use
    machine.until(lambda: len(machine.shelf.pages) == 2)
    machine.shelf.pages.clear()
    assert machine.load("s", keys(1, 2), places(4, 5))  # the third one
    machine.poll()
    assert not machine.shelf.pages
    assert machine.load("t", keys(1, 2), places(4, 5))
    machine.until(lambda: len(machine.shelf.pages) == 2)
    machine.close()


def test_uses_before_a_flush_count_for_demotion(page: int) -> None:
    machine = Machine(page, 32, keep_after=2)
    machine.store(keys(1, 2), places(1, 2))
    machine.clear()
    machine.store(keys(1, 2, 3), places(4, 5, 6))
    machine.until(lambda: set(machine.shelf.pages) == set(keys(1, 2)))
    machine.close()


def test_a_prompt_larger_than_host_memory_keeps_its_first_pages(page: int) -> None:
    """It is computed and stored in parts, and the parts before the last one are not evicted."""
    machine = Machine(page, 4)
    machine.store(keys(8, 9), places(8, 9))
    prompt = keys(1, 2, 3, 4, 5, 6)
    for begin in range(0, 6, 2):
        part = prompt[begin : begin + 2]
        machine.stack.stores.store(part, places(*range(begin, begin + 2)), prompt[:begin])
        machine.until(machine.stack.stores.completed)
        assert machine.stack.stores.pop() is (begin < 4)
    assert machine.stack.host.lookup(prompt) == 4
    machine.close()


def test_a_store_without_room_for_all_pages_fails(machine: Machine) -> None:
    machine.store(keys(*range(16)), places(*range(16)))
    machine.stack.host.pin(np.arange(16))
    assert not machine.store(keys(99), places(20))
    assert machine.store(keys(1, 2), places(1, 2))  # nothing needs to be copied
    machine.stack.host.unpin(np.arange(16))
    assert not machine.store(keys(*range(50, 90)), places(*range(20, 60)))  # not all of them fit
    assert machine.prefixes.lookup("r", keys(*range(50, 90))) == 16


def test_clear_waits_for_copies_and_removes_all_pages(machine: Machine) -> None:
    machine.compute(keys(1, 2), places(1, 2))
    machine.stack.stores.store(keys(1, 2), places(1, 2))
    machine.prefixes.load("r", keys(1), places(5))
    machine.clear()
    machine.blocks[:] = 0
    assert machine.stack.stores.completed() == 0
    assert machine.prefixes.lookup("r", keys(1)) == 0
    assert machine.stack.host.free == 16


def test_a_disabled_stack_finds_and_stores_nothing(machine: Machine) -> None:
    machine.store(keys(1), places(1))
    machine.shelve(keys(2))
    machine.compute(keys(5), places(5))
    machine.stack.stores.store(keys(5), places(5))
    machine.disable("of a test")
    # SGLang holds a lock for each store.
    machine.until(lambda: machine.stack.stores.completed() == 1)
    machine.stack.stores.pop()
    assert machine.prefixes.lookup("r", keys(1)) == 0
    assert machine.prefixes.lookup("q", keys(2)) == 0
    assert not machine.store(keys(3), places(3))
    assert machine.prefixes.lookup("r", keys(3)) == 0


def test_a_slow_tier_is_not_waited_for(machine: Machine) -> None:
    machine.shelve(keys(1, 2))
    machine.prefixes.lookup("r", keys(1))
    machine.settle("r")
    costs = machine.costs
    costs.loaded("shelf", machine.layout.page, 1.0)
    costs.loaded("shelf", machine.layout.page, 1.0)
    costs.computed(0, 1000, 1e-3)
    machine.prefixes.lookup("q", keys(2))
    assert machine.prefixes.ready("q")
    assert machine.shelf.loads == 1
    costs.loads["shelf"] = LoadCost(0.0, 1e-9)
    machine.prefixes.lookup("p", keys(2))
    machine.settle("p")
    assert machine.prefixes.lookup("p", keys(2)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_load_the_stored_pages(page: int, seed: int) -> None:
    """Uses prompts with common prefixes, a small arena, and a tier that is slow at times."""
    choose = random.Random(seed)  # noqa: S311
    machine = Machine(page, 24)
    prompts = [
        [*keys(*range(head)), *keys(*range(1000 * tail, 1000 * tail + 6))]
        for tail in range(1, 12)
        for head in (0, 3, 6)
    ]
    loaded = {"host": 0, "shelf": 0}
    for turn in range(300):
        rid, prompt = f"{turn}", choose.choice(prompts)
        prompt = prompt[: choose.randrange(1, len(prompt) + 1)]
        (machine.shelf.open.clear if choose.random() < 0.2 else machine.shelf.open.set)()
        machine.shelf.lost = {key for key in prompt if choose.random() < 0.05}
        machine.prefixes.lookup(rid, prompt)
        if choose.random() < 0.1:
            machine.prefixes.forget(rid)
            continue
        machine.shelf.open.set()
        machine.settle(rid)
        found = machine.prefixes.lookup(rid, prompt)
        blocks = np.array(choose.sample(range(BLOCKS), len(prompt)))
        if found:
            assert machine.load(rid, prompt[:found], blocks[:found])
            for name, count in given(machine, rid).items():
                loaded[name] += count
        else:
            machine.prefixes.forget(rid)
        machine.store(prompt, blocks)
        if choose.random() < 0.5:  # otherwise the next request meets copies in progress
            machine.until(lambda: not machine.stack.lower[0].under_way)
        machine.check_integrity()
    assert min(loaded.values()) > 50
    for rid in range(300):
        machine.prefixes.forget(f"{rid}")
    machine.until(lambda: machine.stack.host.room == 24)
    machine.close()


def test_pages_beyond_one_batch_are_demoted_in_turn(page: int) -> None:
    machine = Machine(page, 16, keep_after=1)
    machine.store(keys(*range(16)), places(*range(16)))
    machine.until(lambda: len(machine.shelf.pages) == machine.stack.host.room == 16)
    machine.close()


def test_no_load_is_queued_behind_a_hung_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_ext.tiers.throughput._HANGS_S", 0.0)
    machine.shelve(keys(*range(12)))
    machine.shelf.open.clear()
    machine.prefixes.lookup("a", keys(1, 2))
    assert machine.stack.host.free == 14
    machine.until(
        lambda: not machine.stack.lower[0].throughput.worthwhile(faster=True)
    )  # the load has begun
    machine.prefixes.lookup("b", keys(3, 4))
    assert machine.prefixes.ready("b")
    machine.shelf.open.set()
    machine.settle("a")


def test_no_lookup_is_queued_behind_a_load(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier across the network is asked for the pages of other prompts meanwhile."""
    monkeypatch.setattr(machine.shelf, "immediate", False)
    machine.shelve(keys(*range(12)))
    machine.shelf.open.clear()
    machine.prefixes.lookup("a", keys(1, 2))
    machine.until(lambda: machine.shelf.loads == 1)
    asked = machine.stack.lower[0].lookup(keys(3, 4, 20))
    machine.until(asked.done)
    assert asked.result() == 2
    assert machine.shelf.loads == 1
    machine.shelf.open.set()
    machine.prefixes.forget("a")
    machine.until(lambda: machine.stack.host.room == 16)


def test_a_queued_load_is_cancelled_with_its_request(machine: Machine) -> None:
    machine.shelve(keys(*range(12)))
    machine.shelf.open.clear()
    machine.prefixes.lookup("a", keys(1, 2))
    machine.prefixes.lookup("b", keys(3, 4))
    assert machine.stack.host.free == 12
    machine.until(lambda: machine.shelf.loads == 1)
    machine.prefixes.forget("b")
    machine.until(lambda: machine.stack.host.free == 14)
    machine.shelf.open.set()
    machine.settle("a")
    assert machine.shelf.loads == 1
    machine.prefixes.forget("a")
    assert machine.stack.host.room == 16


def test_the_wait_begins_when_admission_is_first_considered(page: int) -> None:
    machine = Machine(page, 16, wait=0.05)
    machine.shelve(keys(1))
    machine.shelf.open.clear()
    machine.prefixes.lookup("r", keys(1))
    time.sleep(0.1)  # the request is in the queue, after others
    assert not machine.prefixes.ready("r")
    machine.settle("r")
    machine.shelf.open.set()
    machine.close()


def test_check_integrity_detects_lost_pins_and_slots_with_two_owners(page: int) -> None:
    machine = Machine(page, 16)
    machine.shelve(keys(1, 2))
    machine.shelf.open.clear()
    machine.prefixes.lookup("r", keys(1, 2))
    (restoration,) = machine.planner.wants.opened.values()
    slots = [restoration.places]
    with pytest.raises(AssertionError, match="share places"):
        machine.stack.host.check_integrity(reserved=[*slots, *slots])
    machine.shelf.open.set()
    machine.settle("r")
    assert machine.prefixes.lookup("r", keys(1, 2)) == 2
    machine.check_integrity()
    machine.stack.host.unpin(machine.stack.host.places(keys(1)))
    with pytest.raises(AssertionError, match="more owners than pins"):
        machine.check_integrity()
    machine.stack.host.pin(machine.stack.host.places(keys(1)))
    with pytest.raises(AssertionError, match="is free"):
        machine.stack.host.check_integrity(reserved=[places(15)])
    machine.close()


def test_a_page_that_is_held_for_a_waiting_request_is_used_when_it_is_admitted(
    machine: Machine,
) -> None:
    names, stack = keys(1, 2), machine.stack
    assert machine.store(names, places(0, 1))
    for _ in range(5):
        stack.holds.let_go(stack.holds.hold(names))
        stack.poll()
    assert stack.hits["host"] == 0
    assert not machine.shelf.pages
    pages = stack.holds.hold(names)
    stack.holds.used(names)
    assert stack.hits["host"] == 2
    machine.until(lambda: len(machine.shelf.pages) == 2)
    stack.holds.let_go(pages)
