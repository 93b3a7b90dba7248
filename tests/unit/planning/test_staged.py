"""Stages that plan one after another agree on what they load, whatever their own tiers hold."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from conftest import until
from stack_kit import Machine
from tier_kit import keys

from sgl_ext.errors import ExtError
from sgl_ext.planning.agreement import (
    Agreement,
    Answer,
    Ended,
    FirstStage,
    Found,
    FurtherStage,
    Report,
    Stored,
)
from sgl_ext.planning.staged_prefixes import StagedPrefixes
from sgl_ext.planning.staged_restorations import Admitted, StagedRestorations
from sgl_ext.planning.staged_stores import PairedStores, StagedStores
from sgl_ext.restore.stage import Arrivals, restore
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stores import Stores

PAGES, REQUESTS, LENGTH = 24, 6, 6
"""Pages of host memory, requests that wait at a time, and pages of each."""


class Wires:
    """Channels between stages in one process; every message is delivered at once."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.down: list[deque[Answer | Stored]] = [deque() for _ in range(stages)]
        self.up: deque[tuple[int, Report | Ended]] = deque()

    def send(self, message: Answer | Stored) -> None:
        for each in self.down:
            each.append(message)

    def received(self) -> Iterator[tuple[int, Report | Ended]]:
        while self.up:
            yield self.up.popleft()


class Wire:
    """One further stage's end of :class:`Wires`."""

    def __init__(self, wires: Wires, stage: int) -> None:
        self._wires, self._stage = wires, stage

    def send(self, message: Report | Ended) -> None:
        self._wires.up.append((self._stage, message))

    def receive(self) -> Answer | Stored:
        return self._wires.down[self._stage - 1].popleft()


class Look(NamedTuple):
    """Look-up of a request in a step, from a page on."""

    rid: str
    first: int
    aborted: bool = False
    """Whether the request is aborted instead, and comes again."""
    early: bool = False
    """Whether it is looked up outside of the common steps before."""


class Stage:
    """Tiers of a stage, and what it does in the steps that all stages have in common."""

    def __init__(self, machine: Machine, agreement: Agreement) -> None:
        self.machine = machine
        self.prefixes = self._prefixes(agreement)

    def _prefixes(self, agreement: Agreement) -> StagedPrefixes:
        return StagedPrefixes(self.machine.stack, self.machine.planner, agreement)

    def step(self, looks: list[Look]) -> list[tuple[str, int]]:
        """Returns the requests that are admitted in this step, and the pages that they load."""
        admitted = []
        for look in looks:
            if look.aborted:
                self.prefixes.forget(look.rid)
                continue
            named = names(look.rid)
            self.prefixes.matching(look.rid)
            if look.early:
                with self.prefixes.early():
                    assert self.prefixes.lookup(look.rid, named) == 0
                self.machine.poll()
            begin = look.first * self.machine.layout.page
            pages = self.prefixes.lookup(look.rid, named[look.first :], begin)
            if not self.prefixes.ready(look.rid):
                continue
            admitted.append((look.rid, pages))
            if pages:
                loaded, blocks = named[look.first : look.first + pages], np.arange(pages)
                self.machine.blocks[blocks] = 0xDD
                assert self.prefixes.load(look.rid, loaded, blocks)
                self.prefixes.forget(look.rid)
                index = self.machine.stack.loads.start()
                assert self.machine.stack.loads.finish(index)
                self.restore(look)
                assert self.machine.right(loaded, blocks)
            else:
                self.prefixes.forget(look.rid)
        self.machine.poll()
        self.machine.stack.holds.check_integrity(self.prefixes.pinned)
        return admitted

    def restore(self, look: Look) -> None:
        """Restores what was admitted before the next forward."""

    def disturb(self, choose: random.Random) -> None:
        """Stores pages of some request, and so evicts others, or puts some into the lower tier."""
        named = names(f"r{choose.randrange(3 * REQUESTS)}")[: choose.randrange(1, LENGTH + 1)]
        if choose.random() < 0.3:
            self.machine.shelve(named)
        else:
            self.machine.store(named, np.arange(len(named)) + 32)


class FakeInputs:
    """Activations of some leading pages of each request, which come late."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self.kept: dict[str, int] = {}

    def begin(self, rid: str, keys: Sequence[Key], begin: int) -> None:
        pass

    def find(self, rid: str, keys: Sequence[Key], begin: int) -> tuple[int, bool]:
        if self._choose.random() < 0.3:
            return 0, False
        self.kept[rid] = self._choose.randrange(len(keys) + 1)
        return self.kept[rid], True

    def overwritten(self, blocks: Pages) -> None:
        pass

    def places(self, rid: str) -> Pages:
        return np.arange(self.kept[rid])

    def forget(self, rid: str) -> None:
        self.kept.pop(rid, None)


class RestoringStage(Stage):
    """Stage that computes the front of a prefix while its back loads."""

    def __init__(self, machine: Machine, agreement: Agreement, choose: random.Random) -> None:
        self._choose = choose
        self.inputs = FakeInputs(choose) if isinstance(agreement, FurtherStage) else None
        self.computed = 0
        super().__init__(machine, agreement)

    def _prefixes(self, agreement: Agreement) -> StagedPrefixes:
        stack, planner = self.machine.stack, self.machine.planner
        return StagedRestorations(
            stack, planner, agreement, self.inputs, lambda: int(self._choose.random() < 0.5)
        )

    def restore(self, look: Look) -> None:
        assert isinstance(self.prefixes, StagedRestorations)
        for admitted in self.prefixes.admitted():
            assert admitted.rid == look.rid
            (run,) = admitted.want.runs
            self.machine.stack.holds.fill(admitted.here, admitted.blocks[: run.here])
            if admitted.inputs is not None:
                assert len(admitted.inputs) >= len(run.keys) - run.here
            inputs = Arrivals()
            inputs.come(run.start + len(run.keys) * self.machine.layout.page)
            if self._choose.random() < 0.2:  # host memory was needed for something else
                self.machine.planner.give_up_one()
            compute, adopt = partial(self._compute, admitted), partial(self._adopt, admitted)
            restore(self.machine.planner, admitted.want, inputs, compute, adopt, 30)
            self.prefixes.restored(admitted.rid)

    def _compute(self, admitted: Admitted, begin: int, end: int) -> None:
        part = self._pages(admitted, begin, end)
        self.machine.compute(admitted.want.runs[0].keys[part], admitted.blocks[part])
        self.computed += part.stop - part.start

    def _adopt(self, admitted: Admitted, begin: int, end: int, places: Pages) -> None:
        part = self._pages(admitted, begin, end)
        self.machine.stack.holds.fill(places, admitted.blocks[part])

    def _pages(self, admitted: Admitted, begin: int, end: int) -> slice:
        start, page = admitted.want.runs[0].start, self.machine.layout.page
        return slice((begin - start) // page, (end - start) // page)


def names(rid: str) -> list[bytes]:
    number = int(rid[1:])
    return keys(*range(100 * number, 100 * number + LENGTH))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("restoring", [False, True])
def test_stages_admit_the_same_with_pages_that_each_of_them_has(
    seed: int, stages: int, restoring: bool
) -> None:
    choose = random.Random(seed)  # noqa: S311
    wires = Wires(stages - 1)
    with ExitStack() as undo:
        running: list[Stage] = []
        for stage in range(stages):
            machine = Machine(1, PAGES, wait=0.05)
            undo.callback(machine.close)
            wire = Wire(wires, stage)
            agreement = FurtherStage(wire) if stage else FirstStage(wires)
            running.append(
                RestoringStage(machine, agreement, choose) if restoring
                else Stage(machine, agreement)
            )  # fmt: skip
        waiting = [f"r{number}" for number in range(REQUESTS)]
        steps: list[list[Look]] = []
        decided: list[list[tuple[str, int]]] = []
        done = [0] * stages
        loaded = 0
        for number in range(150):
            for one in running:
                if choose.random() < 0.3:
                    one.disturb(choose)
            # What the device has changes, and a request may be aborted and come again.
            looks = [
                Look(rid, int(choose.random() < 0.2), choose.random() < 0.05, choose.random() < 0.1)
                for rid in waiting
            ]
            steps.append(looks)
            decided.append(running[0].step(looks))
            done[0] += 1
            for rid, pages in decided[-1]:
                loaded += pages
                waiting[waiting.index(rid)] = f"r{choose.randrange(3 * REQUESTS)}"
            waiting = [*dict.fromkeys(waiting)]
            while len(waiting) < REQUESTS:
                waiting.append(next(r for n in range(99) if (r := f"r{n}") not in waiting))
            for stage in range(1, stages):
                # A stage may be two steps behind the first one, but not ahead of those before it.
                behind = 0 if number == 149 else choose.randrange(3)
                while done[stage] < min(done[0] - behind, done[stage - 1]):
                    at = done[stage]
                    assert running[stage].step(steps[at]) == decided[at]
                    done[stage] += 1
        assert loaded > 5
        for one in running:
            one.prefixes.clear()
            assert not one.prefixes.pinned
            one.machine.check_integrity()
            if isinstance(one, RestoringStage):
                assert one.inputs is None or not one.inputs.kept
        assert all(not each for each in wires.down)


@pytest.mark.parametrize("restoring", [False, True])
def test_after_an_update_of_the_weights_nothing_is_loaded(restoring: bool) -> None:
    """Pinned pages belong to the old weights and are released; stores still complete."""
    choose, wires = random.Random(0), Wires(1)  # noqa: S311
    with ExitStack() as undo:
        stages: list[Stage] = []
        for agreement in (FirstStage(wires), FurtherStage(Wire(wires, 1))):
            machine = Machine(1, PAGES)
            undo.callback(machine.close)
            kind = partial(RestoringStage, choose=choose) if restoring else Stage
            stages.append(kind(machine, agreement))
            machine.store(names("r1"), np.arange(LENGTH))
            agreement.reset()
        stores = [StagedStores(one.machine.stack.stores, one.prefixes._agreement) for one in stages]
        looks = [Look("r1", 0)]
        assert stages[0].step(looks) == [] == stages[1].step(looks)  # both have it, and keep it
        for one, store in zip(stages, stores, strict=True):
            store.announce()
            one.machine.stack.stores.store(names("r2"), np.arange(LENGTH))
            one.prefixes.clear()
            one.machine.disable("the weights change")
        assert stages[0].step(looks) == [("r1", 0)] == stages[1].step(looks)
        for one in stages:
            one.machine.until(lambda one=one: one.machine.stack.stores.completed())
        assert sum(stores[at].completed() for _ in range(2) for at in (0, 1)) == 2


def test_a_request_of_which_the_first_stage_has_nothing_waits_for_nobody() -> None:
    wires = Wires(1)
    first, further = FirstStage(wires), FurtherStage(Wire(wires, 1))
    assert first.prefix("r", 1, Found(0, ready=True)) == Found(0, ready=True)
    assert further.prefix("r", 1, Found(5, ready=True)) == Found(0, ready=True)


def test_an_outdated_report_is_not_used() -> None:
    wires = Wires(1)
    first, further = FirstStage(wires), FurtherStage(Wire(wires, 1))
    found = Found(5, ready=True)
    assert first.prefix("r", 1, found) == Found(0, ready=False)
    assert first.prefix("r", 2, found) == Found(0, ready=False)
    assert further.prefix("r", 1, found) == Found(
        0, ready=False
    )  # reports version 1 after it has ended
    assert first.prefix("r", 2, found) == Found(0, ready=False)
    assert further.prefix("r", 2, Found(4, ready=True)) == Found(0, ready=False)
    assert first.prefix("r", 2, found) == Found(4, ready=True)
    first.forget("r")
    assert first.prefix("r", 3, found) == Found(0, ready=False)


def test_a_stage_that_asks_something_else_is_told_so() -> None:
    wires = Wires(1)
    first, further = FirstStage(wires), FurtherStage(Wire(wires, 1))
    first.prefix("r", 1, Found(0, ready=True))
    with pytest.raises(ExtError, match="plan different steps"):
        further.prefix("other", 1, Found(0, ready=True))
    first.stored([True])
    with pytest.raises(ExtError, match="plan different steps"):
        further.prefix("r", 2, Found(0, ready=True))


class Ending(Stores):
    """Stores of which the test says when they end."""

    def __init__(self) -> None:
        self.over: deque[bool] = deque()

    def completed(self) -> int:
        return len(self.over)

    def pop(self) -> bool:
        return self.over.popleft()


def test_stores_end_when_they_have_ended_in_all_stages() -> None:
    wires = Wires(1)
    stores = Ending(), Ending()
    first = StagedStores(stores[0], FirstStage(wires))
    further = StagedStores(stores[1], FurtherStage(Wire(wires, 1)))
    assert first.completed() == 0 == further.completed()
    assert not wires.down[0]  # nothing was announced, so that nobody asks
    for each in (first, further):
        each.announce()
        each.announce()
    stores[0].over += [True, True]
    assert first.completed() == 0 == further.completed()
    stores[1].over += [True]
    assert first.completed() == 0 == further.completed()
    assert first.completed() == 1 == further.completed()
    assert first.pop() is further.pop() is True
    stores[1].over += [False]
    assert first.completed() == 0 == further.completed()
    assert first.completed() == 1 == further.completed()
    assert first.pop() is further.pop() is False
    assert first.completed() == 0 == further.completed()
    assert not wires.down[0]


def test_stores_from_before_a_reset_do_not_count() -> None:
    wires = Wires(1)
    first, further = FirstStage(wires), FurtherStage(Wire(wires, 1))
    first.stored([])
    assert [*further.stored([True])] == []  # reported, and not known to the first stage yet
    first.reset()
    further.reset()
    assert [*first.stored([True])] == []
    assert [*further.stored([])] == []
    assert [*first.stored([])] == []


def test_kv_and_what_is_beside_it_end_together() -> None:
    kv, beside = Ending(), Ending()
    paired = PairedStores(kv, beside)
    kv.over += [True, False]
    assert paired.completed() == 0
    beside.over += [False, True]
    assert paired.completed() == 2
    assert paired.pop() is True
    assert paired.pop() is False
    assert not kv.over
    assert not beside.over


def test_a_tier_that_hangs_is_not_waited_for_longer_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for its pages is always estimated to be cheaper than to compute them."""
    machine = Machine(1, PAGES, wait=0.2)
    monkeypatch.setattr(machine.planner.costs, "computing", lambda *_: 1.0)
    monkeypatch.setattr(machine.planner.costs, "per_loaded", lambda _tier: 0.001)
    with ExitStack() as undo:
        undo.callback(machine.close)
        undo.callback(machine.shelf.open.set)
        machine.shelve(names("r1"))
        machine.shelf.open.clear()
        prefixes = StagedRestorations(
            machine.stack, machine.planner, FirstStage(Wires(0)), None, lambda: 1
        )

        def ready() -> bool:
            machine.poll()
            prefixes.matching("r1")
            prefixes.lookup("r1", names("r1"), 0)
            return prefixes.ready("r1")

        assert not ready()
        until(ready)
        prefixes.clear()


def test_the_stage_that_needs_most_decides_whether_pages_are_awaited() -> None:
    wires = Wires(2)
    first, *further = (FirstStage(wires), *(FurtherStage(Wire(wires, at)) for at in (1, 2)))
    asked: list[tuple[float, float]] = []

    def awaited(loading: float, computing: float) -> bool:
        asked.append((loading, computing))
        return loading > 0

    def step(*others: Found) -> Found:
        """Returns the answer to reports of the last step; the first stage has all pages."""
        found = first.prefix("r", 1, Found(5, ready=True), awaited=awaited)
        for one, reported in zip(further, others, strict=True):
            assert one.prefix("r", 1, reported) == found
        return found

    slow, slower = Found(4, True, 1.0, 3.0), Found(5, True, 2.0, 2.5)
    assert step(slow, slower) == Found(0, ready=False)
    assert step(Found(4, True), Found(5, True)) == Found(4, ready=False)
    assert step(Found(4, True), Found(5, True)) == Found(4, ready=True)
    assert asked == [(2.0, 3.0), (0.0, 0.0)]


@pytest.mark.parametrize("running", [0, 1])
def test_a_request_waits_for_a_further_stage_while_others_run(
    running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage has all pages, the other one has to load them; waiting costs less."""
    wires, named = Wires(1), keys(*range(12))  # more than a load takes
    with ExitStack() as undo:
        stages: list[tuple[Machine, StagedRestorations]] = []
        for agreement in (FirstStage(wires), FurtherStage(Wire(wires, 1))):
            machine = Machine(1, PAGES)
            undo.callback(machine.close)
            undo.callback(machine.shelf.open.set)
            monkeypatch.setattr(machine.planner.costs, "computing", lambda *_: 1.0)
            monkeypatch.setattr(machine.planner.costs, "per_loaded", lambda _tier: 0.001)
            stages.append((
                machine,
                StagedRestorations(
                    machine.stack, machine.planner, agreement, None, lambda: running
                ),
            ))  # fmt: skip
        (has, first), (lacks, further) = stages
        has.store(named, np.arange(len(named)))
        lacks.shelve(named)
        lacks.shelf.open.clear()
        answers: list[int] = []

        def step() -> bool:
            """Returns whether the request is admitted."""
            for machine, prefixes in stages:
                machine.poll()
                prefixes.matching("r")
                answers.append(prefixes.lookup("r", named))
            assert answers[-1] == answers[-2]
            assert first.ready("r") == further.ready("r")
            return first.ready("r")

        def reported() -> bool:
            step()
            return "r" in further._restorable

        until(reported)
        assert step() != bool(running)
        lacks.shelf.open.set()
        until(step)
        assert answers[-1] == len(named)
        for _, prefixes in stages:
            prefixes.clear()
