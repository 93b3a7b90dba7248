"""Restorations over real host memory and the threads of a tier that obeys the test."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from restore_kit import PAGE, UNIT, Machine, until
from tier_kit import keys

from sgl_ext.plan import Compute, Load
from sgl_ext.restore.policies import Cake, Longest, Policy


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.restorer.close()
    machine.tier.close()
    machine.engine.close()


def test_a_prefix_is_computed_and_loaded(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.restorer.ask("a", names, 0, 0, 83)
    assert machine.restorer.turn("a", continuing=False)
    plans = machine.run("a", names, 83)
    report = machine.restorer.report("a")
    assert report is not None
    loaded = sum(span.end - span.start for span in plans[-1].spans if isinstance(span.source, Load))
    assert report["loaded"]["shelf"] >= loaded > 0
    # What was on its way may land between a plan that computes it and the forward.
    came = 80 - report["computed"]
    assert loaded <= came <= loaded + UNIT * PAGE
    machine.restorer.release("a")
    machine.settle()
    assert not machine.restorer.pending()
    assert len(machine.host) == came // PAGE  # what landed can be found
    assert machine.hits["shelf"] >= came // PAGE
    assert machine.host.free == 64 - came // PAGE


def test_what_does_not_land_is_computed(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.lost = {names[19], names[17], names[12]}
    machine.restorer.ask("a", names, 0, 0, 83)
    plans = machine.run("a", names, 83)
    spans = plans[-1].spans
    holes = [span for span in spans if isinstance(span.source, Compute)]
    assert any(span.start <= 17 * PAGE < span.end for span in holes)
    assert any(span.start <= 19 * PAGE < span.end for span in holes)
    machine.restorer.release("a")
    machine.settle()
    assert not set(machine.host.present(names)) & machine.shelf.lost


def test_a_request_that_goes_while_pages_come(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.restorer.ask("a", names, 0, 0, 83)
    until(lambda: machine.shelf.loads == 1)
    machine.restorer.release("a")
    machine.restorer.advance()
    machine.host.check_integrity()
    assert machine.host.free == 64 - 20  # something may still land in them
    machine.shelf.open.set()
    machine.settle()
    assert machine.host.free == 64 - UNIT
    assert machine.shelf.loads == 1


def test_the_same_prefix_is_restored_once(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.restorer.ask("a", names, 0, 0, 83)
    machine.restorer.ask("b", names, 0, 0, 90)
    assert not machine.restorer.turn("b", continuing=False)
    assert machine.restorer.turn("a", continuing=False)
    machine.run("a", names, 83)
    machine.restorer.release("a")
    machine.restorer.ask("b", names, len(names), 0, 90)  # host memory has it all by now
    assert machine.restorer.turn("b", continuing=False)
    assert not machine.restorer.restores("b")


def test_who_shares_little_has_its_own_turn(machine: Machine) -> None:
    """As behind a system prompt: the shorter goes first, and what both have is kept once."""
    system, own, other = keys(0, 1), keys(*range(2, 30)), keys(*range(30, 36))
    machine.keep(system + own + other)
    machine.shelf.open.clear()  # the longer one would be the shorter when most of it has come
    machine.restorer.ask("long", system + own, 0, 0, 123)
    machine.restorer.ask("short", system + other, 0, 0, 35)
    assert not machine.restorer.turn("long", continuing=False)
    assert machine.restorer.turn("short", continuing=False)
    machine.shelf.open.set()
    machine.run("short", system + other, 35)
    machine.restorer.release("short")
    machine.restorer.advance()
    assert machine.restorer.turn("long", continuing=False)
    machine.run("long", system + own, 123)
    machine.restorer.release("long")
    machine.settle()
    machine.host.check_integrity()
    assert machine.host.free == 64 - len(machine.host)


def test_short_ones_go_first_and_one_at_a_time(machine: Machine) -> None:
    long, short = keys(*range(30)), keys(*range(30, 40))
    machine.keep(long + short)
    machine.shelf.open.clear()
    machine.restorer.ask("long", long, 0, 0, 130)
    machine.restorer.ask("short", short, 0, 0, 45)
    assert not machine.restorer.turn("long", continuing=False)
    assert not machine.restorer.turn("short", continuing=True)
    assert machine.restorer.turn("short", continuing=False)
    machine.restorer.plan("short", 0, 45)
    machine.restorer.computing("short", 8)
    assert not machine.restorer.turn("long", continuing=False)
    machine.restorer.release("short")
    assert machine.restorer.turn("long", continuing=False)
    machine.shelf.open.set()


def test_a_shorter_one_interrupts(machine: Machine) -> None:
    """What was computed of the longer one stays, and what was loaded."""
    long, short = keys(*range(30)), keys(*range(30, 34))
    machine.keep(long + short)
    machine.shelf.open.clear()  # the longer one would be the shorter when most of it has come
    machine.restorer.ask("long", long, 0, 0, 130)
    assert machine.restorer.turn("long", continuing=False)
    plan = machine.restorer.plan("long", 0, 130)
    assert plan is not None
    done = plan.reach(0, 130)
    machine.restorer.computing("long", done)
    machine.restorer.advance()
    assert machine.restorer.preferred() is None  # nobody is there
    machine.restorer.ask("short", short, 0, 0, 18)
    until(lambda: machine.restorer.advance() or machine.restorer.restores("short"))
    assert not machine.restorer.turn("short", continuing=True)
    assert machine.restorer.preferred() == "short"
    machine.restorer.interrupt()
    assert not machine.restorer.computes("long")
    assert not machine.restorer.turn("long", continuing=False)
    assert machine.restorer.turn("short", continuing=False)
    machine.shelf.open.set()
    machine.run("short", short, 18)
    machine.restorer.advance()
    assert machine.restorer.preferred() is None  # the other one is longer
    machine.restorer.release("short")
    machine.restorer.advance()
    assert machine.restorer.turn("long", continuing=False)
    plans = machine.run("long", long, 130, done)
    assert any(isinstance(span.source, Load) for span in plans[-1].spans)
    report = machine.restorer.report("long")
    assert report is not None
    assert sum(report["loaded"].values()) + report["computed"] == len(long) * PAGE
    machine.restorer.release("long")
    machine.settle()
    assert machine.restorer.interrupted == 1


def test_who_is_nearly_done_is_not_interrupted(machine: Machine) -> None:
    """Also not behind what was restored, where only computing is left."""
    long, short = keys(*range(8)), keys(*range(30, 34))
    machine.keep(long + short)
    machine.restorer.ask("long", long, 0, 0, 400)
    plans = machine.run("long", long, 36)
    assert plans
    machine.restorer.ask("short", short, 0, 0, 18)
    until(lambda: machine.restorer.advance() or machine.restorer.restores("short"))
    for reached, other in ((100, "short"), (390, None), (398, None)):
        machine.restorer.computing("long", reached)
        machine.restorer.advance()
        assert not machine.restorer.turn("short", continuing=True)
        assert machine.restorer.preferred() == other
    machine.restorer.ask("short", short, 0, 0, 18, -1)
    assert machine.restorer.preferred() == "short"  # it is more urgent


@pytest.mark.parametrize("policy", [Longest(), Cake()])
def test_who_came_first_is_computed_to_the_end(machine: Machine, policy: Policy) -> None:
    machine.restorer._channels._policy = policy
    long, short = keys(*range(30)), keys(*range(30, 34))
    machine.keep(long + short)
    machine.restorer.ask("long", long, 0, 0, 130)
    machine.restorer.ask("short", short, 0, 0, 18, -1)
    until(lambda: machine.restorer.advance() or machine.restorer.restores("short"))
    machine.restorer.plan("long", 0, 130)
    machine.restorer.computing("long", 8)
    assert machine.restorer.preferred() is None


def test_the_more_urgent_goes_before_the_shorter(machine: Machine) -> None:
    long, short = keys(*range(30)), keys(*range(30, 40))
    machine.keep(long + short)
    machine.restorer.ask("long", long, 0, 0, 130, -1)
    machine.restorer.ask("short", short, 0, 0, 45)
    assert not machine.restorer.turn("short", continuing=False)
    assert machine.restorer.turn("long", continuing=False)
    machine.restorer.ask("short", short, 0, 0, 45, -2)  # its priority has changed
    machine.restorer.advance()
    assert not machine.restorer.turn("long", continuing=False)
    assert machine.restorer.turn("short", continuing=False)


def test_who_followed_another_one_has_waited_since_it_came(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.restorer.ask("a", names, 0, 0, 83)
    begin = time.monotonic()
    machine.restorer.ask("b", names, 0, 0, 90)
    time.sleep(0.05)
    machine.restorer.release("a")
    machine.restorer.ask("b", names, 0, 0, 90)
    until(lambda: machine.restorer.advance() or machine.restorer.restores("b"))
    report, waited = machine.restorer.report("b"), time.monotonic() - begin
    assert report is not None
    assert 0.05 <= report["seconds"] <= waited


def test_more_than_there_is_room_for() -> None:
    """Who has places goes first; then the other one makes do with what there is."""
    machine = Machine(places=24)
    one, other = keys(*range(20)), keys(*range(20, 50))
    machine.keep(one + other)
    machine.restorer.ask("one", one, 0, 0, 83)
    machine.restorer.ask("other", other, 0, 0, 123)
    for _ in range(2):
        machine.restorer.advance()
        assert not machine.restorer.turn("other", continuing=False)
        assert machine.restorer.turn("one", continuing=False)
    machine.run("one", one, 83)
    machine.restorer.release("one")
    machine.settle()
    assert machine.restorer.turn("other", continuing=False)
    plans = machine.run("other", other, 123)
    assert all(
        span.start >= (30 - 24) * PAGE
        for plan in plans
        for span in plan.spans
        if isinstance(span.source, Load)
    )
    machine.restorer.release("other")
    machine.settle()
    machine.restorer.close()
    machine.tier.close()
    machine.engine.close()


def test_a_prefix_that_nobody_has(machine: Machine) -> None:
    machine.restorer.ask("a", keys(*range(20)), 0, 0, 83)
    assert machine.restorer.turn("a", continuing=False)
    assert not machine.restorer.restores("a")
    assert machine.host.free == 64


def test_a_request_that_comes_back_while_its_last_load_lands(machine: Machine) -> None:
    """Under the same name, as one does that was retracted."""
    names = keys(*range(2 * UNIT))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.restorer.ask("a", names, 0, 0, 4 * UNIT * PAGE)
    until(lambda: machine.shelf.loads == 1)
    machine.restorer.release("a")
    machine.restorer.ask("a", names, 0, 0, 4 * UNIT * PAGE)
    machine.shelf.open.set()
    assert machine.restorer.turn("a", continuing=False)
    machine.run("a", names, 4 * UNIT * PAGE)
    machine.restorer.release("a")
    machine.settle()
    assert machine.host.free == 64 - len(machine.host)


def test_pages_that_the_device_has_had_and_lost(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.restorer.ask("a", names, 0, 0, 83)
    machine.restorer.plan("a", 80, 83)  # all of it; but then it is not admitted
    machine.shelf.open.set()
    time.sleep(0.05)
    assert machine.restorer.turn("a", continuing=False)
    plans = machine.run("a", names, 83)
    assert any(isinstance(span.source, Load) for span in plans[-1].spans)
    machine.restorer.release("a")
    machine.settle()


def test_a_load_that_hangs_is_not_waited_for(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.restorer.ask("a", names, 0, 0, 83)
    assert machine.restorer.turn("a", continuing=False)
    plans = machine.run("a", names, 83)
    assert not any(isinstance(span.source, Load) for plan in plans for span in plan.spans)
    machine.restorer.release("a")
    machine.shelf.open.set()
    machine.settle()
    assert machine.host.free == 64


def test_the_end_of_a_prefix_that_another_request_has_computed(machine: Machine) -> None:
    """The device has more by now than the tier had."""
    names = keys(*range(20))
    machine.keep(names[:10])
    machine.restorer.ask("a", names, 0, 0, 83)
    assert machine.restorer.turn("a", continuing=False)
    machine.run("a", names, 83, begin=60)
    report = machine.restorer.report("a")
    assert report is not None
    assert report["computed"] == 0
    machine.restorer.release("a")
    machine.settle()


def test_who_waits_for_a_part_of_what_another_one_restores(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.restorer.ask("a", names, 0, 0, 83)
    machine.restorer.ask("b", names[8:], 0, 8, 90)  # the device has a's first pages by now
    assert not machine.restorer.turn("b", continuing=False)
    machine.restorer.release("a")
    machine.settle()


def test_what_waits_gives_up_what_is_kept_for_it() -> None:
    """A preempted request needs the room. What is being restored stays."""
    machine = Machine(places=11)
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    for at in (0, 10):
        pages = machine.host.reserve(1)
        assert pages is not None
        machine.host.publish([names[at]], pages)
    machine.restorer.ask("a", names[:10], 1, 0, 43)
    until(lambda: machine.restorer.restores("a") or machine.restorer.turn("a", continuing=False))
    machine.restorer.ask("b", names[10:], 1, 10, 83)
    assert machine.host.room == 0
    assert machine.restorer.give_up_one()
    assert not machine.restorer.give_up_one()
    assert machine.host.room == 1
    assert machine.restorer.restores("a")
    assert not machine.restorer.asked("b")
    machine.shelf.open.set()
    machine.restorer.release("a")
    machine.settle()
