"""Planner with real host memory and the threads of a tier that the test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from restore_kit import PAGE, UNIT, Machine, until
from tier_kit import DEADLINE_S, keys

from sgl_ext.planning.plan import Compute, Load
from sgl_ext.planning.policies import Cake, Longest, Policy


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.planner.close()
    machine.tier.close()
    machine.engine.close()


def test_a_prefix_is_partly_computed_and_partly_loaded(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.ask("a", names, 0, 0, 83)
    assert machine.planner.turn("a", continuing=False)
    plans = machine.run("a", names, 83)
    report = machine.planner.report("a")
    assert report is not None
    loaded = sum(span.end - span.start for span in plans[-1].spans if isinstance(span.source, Load))
    assert report["loaded"]["shelf"] >= loaded > 0
    # A page in flight may land between a plan that computes it and the forward.
    came = 80 - report["computed"]
    assert loaded <= came <= loaded + UNIT * PAGE
    machine.planner.release("a")
    machine.settle()
    assert not machine.planner.pending()
    assert len(machine.host) == came // PAGE  # landed pages are in the index
    assert machine.hits["shelf"] >= came // PAGE
    assert machine.host.free == 64 - came // PAGE


def test_pages_that_do_not_land_are_computed(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.lost = {names[19], names[17], names[12]}
    machine.ask("a", names, 0, 0, 83)
    plans = machine.run("a", names, 83)
    spans = plans[-1].spans
    holes = [span for span in spans if isinstance(span.source, Compute)]
    assert any(span.start <= 17 * PAGE < span.end for span in holes)
    assert any(span.start <= 19 * PAGE < span.end for span in holes)
    machine.planner.release("a")
    machine.settle()
    assert not set(machine.host.present(names)) & machine.shelf.lost


def test_places_of_a_released_request_stay_held_until_its_load_ends(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.ask("a", names, 0, 0, 83)
    until(lambda: machine.shelf.loads == 1)
    machine.planner.release("a")
    machine.planner.advance()
    machine.host.check_integrity()
    assert machine.host.free == 64 - 20  # a load may still write to them
    machine.shelf.open.set()
    machine.settle()
    assert machine.host.free == 64 - UNIT
    assert machine.shelf.loads == 1


def test_the_same_prefix_is_restored_once(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.ask("a", names, 0, 0, 83)
    machine.ask("b", names, 0, 0, 90)
    assert not machine.planner.turn("b", continuing=False)
    assert machine.planner.turn("a", continuing=False)
    machine.run("a", names, 83)
    machine.planner.release("a")
    machine.ask("b", names, len(names), 0, 90)  # host memory has all pages now
    assert machine.planner.turn("b", continuing=False)
    assert not machine.planner.restores("b")


def test_requests_that_share_few_pages_are_restored_separately(machine: Machine) -> None:
    """Restores the shorter of two prompts first; pages of their system prompt are kept once."""
    system, own, other = keys(0, 1), keys(*range(2, 30)), keys(*range(30, 36))
    machine.keep(system + own + other)
    machine.shelf.open.clear()  # otherwise the longer one becomes the shorter once it has landed
    machine.ask("long", system + own, 0, 0, 123)
    machine.ask("short", system + other, 0, 0, 35)
    assert not machine.planner.turn("long", continuing=False)
    assert machine.planner.turn("short", continuing=False)
    machine.shelf.open.set()
    machine.run("short", system + other, 35)
    machine.planner.release("short")
    machine.planner.advance()
    assert machine.planner.turn("long", continuing=False)
    machine.run("long", system + own, 123)
    machine.planner.release("long")
    machine.settle()
    machine.host.check_integrity()
    assert machine.host.free == 64 - len(machine.host)


def test_the_shortest_request_is_computed_first_and_alone(machine: Machine) -> None:
    long, short = keys(*range(30)), keys(*range(30, 40))
    machine.keep(long + short)
    machine.shelf.open.clear()
    machine.ask("long", long, 0, 0, 130)
    machine.ask("short", short, 0, 0, 45)
    assert not machine.planner.turn("long", continuing=False)
    assert not machine.planner.turn("short", continuing=True)
    assert machine.planner.turn("short", continuing=False)
    machine.planner.plan("short", 0, 45)
    machine.planner.computing("short", 8)
    assert not machine.planner.turn("long", continuing=False)
    machine.planner.release("short")
    assert machine.planner.turn("long", continuing=False)
    machine.shelf.open.set()


def test_a_shorter_request_interrupts_a_longer_one(machine: Machine) -> None:
    """Keeps the computed and the loaded pages of the longer request."""
    long, short = keys(*range(30)), keys(*range(30, 34))
    machine.keep(long + short)
    machine.shelf.open.clear()  # otherwise the longer one becomes the shorter once it has landed
    machine.ask("long", long, 0, 0, 130)
    assert machine.planner.turn("long", continuing=False)
    plan = machine.planner.plan("long", 0, 130)
    assert plan is not None
    done = plan.reach(0, 130)
    machine.planner.computing("long", done)
    machine.planner.advance()
    assert machine.planner.preferred() is None  # there is no other request
    machine.ask("short", short, 0, 0, 18)
    until(lambda: machine.planner.advance() or machine.planner.restores("short"))
    assert not machine.planner.turn("short", continuing=True)
    assert machine.planner.preferred() == "short"
    machine.planner.interrupt()
    assert not machine.planner.computes("long")
    assert not machine.planner.turn("long", continuing=False)
    assert machine.planner.turn("short", continuing=False)
    machine.shelf.open.set()
    machine.run("short", short, 18)
    machine.planner.advance()
    assert machine.planner.preferred() is None  # the other request is longer
    machine.planner.release("short")
    machine.planner.advance()
    assert machine.planner.turn("long", continuing=False)
    plans = machine.run("long", long, 130, done)
    assert any(isinstance(span.source, Load) for span in plans[-1].spans)
    report = machine.planner.report("long")
    assert report is not None
    assert sum(report["loaded"].values()) + report["computed"] == len(long) * PAGE
    machine.planner.release("long")
    machine.settle()
    assert machine.planner.interrupted == 1


def test_a_nearly_finished_request_is_not_interrupted(machine: Machine) -> None:
    """Includes positions after the restored prefix, where only computing is left."""
    long, short = keys(*range(8)), keys(*range(30, 34))
    machine.keep(long + short)
    machine.ask("long", long, 0, 0, 400)
    plans = machine.run("long", long, 36)
    assert plans
    machine.ask("short", short, 0, 0, 18)
    until(lambda: machine.planner.advance() or machine.planner.restores("short"))
    for reached, other in ((100, "short"), (390, None), (398, None)):
        machine.planner.computing("long", reached)
        machine.planner.advance()
        assert not machine.planner.turn("short", continuing=True)
        assert machine.planner.preferred() == other
    machine.ask("short", short, 0, 0, 18, -1)
    assert machine.planner.preferred() == "short"  # it is more urgent


@pytest.mark.parametrize("policy", [Longest(), Cake()])
def test_longest_and_cake_do_not_interrupt(machine: Machine, policy: Policy) -> None:
    machine.planner._channels._policy = policy
    long, short = keys(*range(30)), keys(*range(30, 34))
    machine.keep(long + short)
    machine.ask("long", long, 0, 0, 130)
    machine.ask("short", short, 0, 0, 18, -1)
    until(lambda: machine.planner.advance() or machine.planner.restores("short"))
    machine.planner.plan("long", 0, 130)
    machine.planner.computing("long", 8)
    assert machine.planner.preferred() is None


def test_a_more_urgent_request_goes_before_a_shorter_one(machine: Machine) -> None:
    long, short = keys(*range(30)), keys(*range(30, 40))
    machine.keep(long + short)
    machine.ask("long", long, 0, 0, 130, -1)
    machine.ask("short", short, 0, 0, 45)
    assert not machine.planner.turn("short", continuing=False)
    assert machine.planner.turn("long", continuing=False)
    machine.ask("short", short, 0, 0, 45, -2)  # its priority has changed
    machine.planner.advance()
    assert not machine.planner.turn("long", continuing=False)
    assert machine.planner.turn("short", continuing=False)


@pytest.mark.parametrize("landed", [False, True])
def test_an_urgent_request_does_not_wait_for_a_less_urgent_one_with_its_pages(
    machine: Machine, landed: bool
) -> None:
    """The other one's request may wait for memory that more urgent requests hold."""
    names = keys(*range(20))
    machine.keep(names)
    if not landed:
        machine.shelf.open.clear()
    machine.ask("late", names, 0, 0, 83, precedence=1)
    if landed:
        until(lambda: not machine.planner.loads("late"))
    machine.ask("urgent", names, 0, 0, 90)
    machine.ask("same", names, 0, 0, 90, precedence=1)
    machine.planner.advance()
    assert machine.planner.turn("urgent", continuing=False)
    assert not machine.planner.turn("late", continuing=False)
    assert not machine.planner.turn("same", continuing=False)
    machine.shelf.open.set()
    machine.run("urgent", names, 90)
    for rid in ("urgent", "late"):
        machine.planner.release(rid)
    machine.settle()
    machine.planner.check_integrity()
    assert machine.host.free == 64 - len(machine.host)


@pytest.mark.parametrize(("places", "loaded"), [(20, 0), (26, 6)])
def test_an_urgent_request_does_not_wait_for_places_of_a_less_urgent_one(
    places: int, loaded: int
) -> None:
    machine = Machine(places)
    late, names = keys(*range(20)), keys(*range(20, 40))
    machine.keep(late + names)
    machine.ask("late", late, 0, 0, 83, precedence=1)
    until(lambda: not machine.planner.loads("late"))
    machine.ask("urgent", names, 0, 0, 90)
    until(lambda: machine.planner.wants.requests["urgent"].answered)
    machine.planner.advance()
    assert machine.planner.turn("urgent", continuing=False)
    assert machine.planner.restores("urgent") == (loaded > 0)
    plans = machine.run("urgent", names, 90)
    spans = [span for plan in plans for span in plan.spans if isinstance(span.source, Load)]
    assert all(span.start >= (20 - loaded) * PAGE for span in spans)
    for rid in ("urgent", "late"):
        machine.planner.release(rid)
    machine.settle()
    assert machine.host.free == places - len(machine.host)
    machine.planner.close()


def test_wait_of_a_former_follower_counts_from_its_arrival(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.ask("a", names, 0, 0, 83)
    begin = time.monotonic()
    machine.ask("b", names, 0, 0, 90)
    time.sleep(0.05)
    machine.planner.release("a")
    machine.ask("b", names, 0, 0, 90)
    until(lambda: machine.planner.advance() or machine.planner.restores("b"))
    report, waited = machine.planner.report("b"), time.monotonic() - begin
    assert report is not None
    assert 0.05 <= report["seconds"] <= waited


def test_a_prefix_larger_than_host_memory_is_loaded_in_part() -> None:
    """Computes the request that holds places first; the other one then loads what fits."""
    machine = Machine(places=24)
    one, other = keys(*range(20)), keys(*range(20, 50))
    machine.keep(one + other)
    machine.ask("one", one, 0, 0, 83)
    machine.ask("other", other, 0, 0, 123)
    for _ in range(2):
        machine.planner.advance()
        assert not machine.planner.turn("other", continuing=False)
        assert machine.planner.turn("one", continuing=False)
    machine.run("one", one, 83)
    machine.planner.release("one")
    machine.settle()
    assert machine.planner.turn("other", continuing=False)
    plans = machine.run("other", other, 123)
    assert all(
        span.start >= (30 - 24) * PAGE
        for plan in plans
        for span in plan.spans
        if isinstance(span.source, Load)
    )
    machine.planner.release("other")
    machine.settle()
    machine.planner.close()
    machine.tier.close()
    machine.engine.close()


def test_a_prefix_that_no_tier_has_is_not_restored(machine: Machine) -> None:
    machine.ask("a", keys(*range(20)), 0, 0, 83)
    assert machine.planner.turn("a", continuing=False)
    assert not machine.planner.restores("a")
    assert machine.host.free == 64


def test_a_tier_whose_answers_take_time_is_asked_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang looks waiting requests up in each step, also after the answer."""
    asked: list[int] = []
    answer = threading.Event()

    def lookup(names: list[bytes]) -> int:
        asked.append(len(names))
        assert answer.wait(DEADLINE_S)
        return 0

    monkeypatch.setattr(machine.shelf, "immediate", False)
    monkeypatch.setattr(machine.shelf, "lookup", lookup)
    names = keys(*range(20))
    machine.ask("a", names, 0, 0, 83)
    assert not machine.planner.turn("a", continuing=False)
    answer.set()
    until(lambda: not machine.tier.under_way)
    for _ in range(3):
        machine.planner.advance()
        machine.ask("a", names, 0, 0, 83)
        assert machine.planner.turn("a", continuing=False)
    assert asked == [20]
    machine.ask("a", names[8:], 0, 8, 83)  # another prefix is on the device now
    until(lambda: not machine.tier.under_way)
    assert asked == [20, 12]
    machine.planner.release("a")
    machine.ask("a", names[8:], 0, 8, 83)
    until(lambda: not machine.tier.under_way)
    assert asked == [20, 12, 12]


def test_a_request_does_not_wait_longer_for_another_one_than_for_tiers() -> None:
    machine = Machine(wait=0.0)
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.ask("a", names, 0, 0, 83)
    machine.ask("b", names, 0, 0, 83)
    machine.planner.advance()
    assert not machine.planner.turn("b", continuing=False)
    time.sleep(1e-3)
    machine.planner.advance()
    assert machine.planner.turn("b", continuing=False)
    machine.shelf.open.set()
    for rid in ("a", "b"):
        machine.planner.release(rid)
    machine.settle()
    machine.planner.close()
    machine.tier.close()
    machine.engine.close()


def test_a_request_can_return_while_its_last_load_is_in_flight(machine: Machine) -> None:
    """Uses the same request id again, as a retracted request does."""
    names = keys(*range(2 * UNIT))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.ask("a", names, 0, 0, 4 * UNIT * PAGE)
    until(lambda: machine.shelf.loads == 1)
    machine.planner.release("a")
    machine.ask("a", names, 0, 0, 4 * UNIT * PAGE)
    machine.shelf.open.set()
    assert machine.planner.turn("a", continuing=False)
    machine.run("a", names, 4 * UNIT * PAGE)
    machine.planner.release("a")
    machine.settle()
    assert machine.host.free == 64 - len(machine.host)


def test_pages_evicted_from_the_device_before_admission_are_loaded(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.ask("a", names, 0, 0, 83)
    machine.planner.plan("a", 80, 83)  # the device had all pages, but the request was not admitted
    machine.shelf.open.set()
    time.sleep(0.05)
    assert machine.planner.turn("a", continuing=False)
    plans = machine.run("a", names, 83)
    assert any(isinstance(span.source, Load) for span in plans[-1].spans)
    machine.planner.release("a")
    machine.settle()


def test_a_hung_load_is_not_waited_for(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    machine.ask("a", names, 0, 0, 83)
    assert machine.planner.turn("a", continuing=False)
    plans = machine.run("a", names, 83)
    assert not any(isinstance(span.source, Load) for plan in plans for span in plan.spans)
    machine.planner.release("a")
    machine.shelf.open.set()
    machine.settle()
    assert machine.host.free == 64


def test_a_prefix_that_another_request_has_computed_is_not_computed(machine: Machine) -> None:
    """Begins after the pages that the tier has: the device has more pages now."""
    names = keys(*range(20))
    machine.keep(names[:10])
    machine.ask("a", names, 0, 0, 83)
    assert machine.planner.turn("a", continuing=False)
    machine.run("a", names, 83, begin=60)
    report = machine.planner.report("a")
    assert report is not None
    assert report["computed"] == 0
    machine.planner.release("a")
    machine.settle()


def test_a_request_waits_for_one_that_restores_its_missing_pages(machine: Machine) -> None:
    names = keys(*range(20))
    machine.keep(names)
    machine.ask("a", names, 0, 0, 83)
    machine.ask("b", names[8:], 0, 8, 90)  # the device has a's first pages now
    assert not machine.planner.turn("b", continuing=False)
    machine.planner.release("a")
    machine.settle()


def test_a_waiting_request_gives_up_its_pinned_pages() -> None:
    """Makes room for a preempted request; the pages of an open restoration stay."""
    machine = Machine(places=11)
    names = keys(*range(20))
    machine.keep(names)
    machine.shelf.open.clear()
    for at in (0, 10):
        pages = machine.host.reserve(1)
        assert pages is not None
        machine.host.publish([names[at]], pages)
    machine.ask("a", names[:10], 1, 0, 43)
    until(lambda: machine.planner.restores("a") or machine.planner.turn("a", continuing=False))
    machine.ask("b", names[10:], 1, 10, 83)
    assert machine.host.room == 0
    assert machine.planner.give_up_one()
    assert not machine.planner.give_up_one()
    assert machine.host.room == 1
    assert machine.planner.restores("a")
    assert "b" not in machine.planner.wants
    machine.shelf.open.set()
    machine.planner.release("a")
    machine.settle()
