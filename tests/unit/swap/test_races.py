"""Requests are preempted, resumed, ended and aborted while copies are late or fail."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from delayed_copies import DelayedEngine
from stack_kit import BLOCKS, Machine
from tier_kit import DEADLINE_S, holds, key

from sgl_ext.config import SwapExperiment
from sgl_ext.memory.block_groups import BlockGroups
from sgl_ext.memory.runs import runs_of
from sgl_ext.swap.manager import SwapManager
from sgl_ext.tiers.arena import Key

PAGE = 4
ROUNDS = int(os.environ.get("SGLEXT_ROUNDS", "0")) or 1000


@dataclass
class Request:
    """Request whose KV is that of a prompt, shared with other requests, and of its own answer."""

    name: int
    prompt: int
    tokens: int
    blocks: list[int] = field(default_factory=list)
    """Its blocks on the device while it runs."""

    @property
    def pages(self) -> int:
        return -(-self.tokens // PAGE)

    def key_of(self, page: int) -> Key:
        """Returns the key of a page's content; that of the last page changes with each token."""
        last = min((page + 1) * PAGE, self.tokens)
        if last <= self.prompt:
            return key(page)
        return key(10_000 * self.name + last)


class Scheduler:
    """Stand-in for SGLang's scheduler that only manages memory."""

    def __init__(
        self, machine: Machine, delayed: DelayedEngine, chance: random.Random, capacity: int
    ) -> None:
        self.machine, self.delayed, self.chance = machine, delayed, chance
        self.swap = SwapManager(machine.stack, capacity, SwapExperiment())
        self.groups = BlockGroups(BLOCKS, page=1, first=0)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.held: list[tuple[Request, int]] = []
        """Requests that are resumed in the next step, and their number of pages on the device."""
        self.came = self.back = self.again = self.early = self.pending_aborts = 0

    def step(self) -> None:
        chance = self.chance
        self.machine.stack.poll()
        self.swap.advance()
        if chance.random() < 0.3:
            self.come()
        for one in [*self.running]:
            if chance.random() < 0.15:
                self.end(one)
            elif chance.random() < 0.3:
                self.give_way(one)
            else:
                self.generate(one)
        for one, first in self.held:
            self.come_back(one, first)
        self.held = []
        for one in [*self.waiting]:
            if chance.random() < 0.2:
                self.abort(one)
            elif chance.random() < 0.5:
                self.take_back(one)
        self.delayed.let_happen(chance.choice([0, 0, 0, 0, 1, 2, 12]))
        while self.machine.stack.stores.completed():
            self.machine.stack.stores.pop()

    def allocate(self, count: int) -> list[int] | None:
        """Allocates blocks as our allocator does: returns them when no copy reads or writes them.

        Returns None if there are too few.
        """
        if (runs := self.groups.allocate([(None, count)])) is None:
            return None
        blocks = [start + at for start, length in runs[0] for at in range(length)]
        self.machine.stack.in_flight.wait(np.array(blocks, np.int64), DEADLINE_S)
        self.machine.blocks[blocks] = 0xDD
        return blocks

    def free(self, one: Request) -> None:
        self.groups.release(runs_of(np.array(one.blocks, np.int64)))
        one.blocks = []

    def compute(self, one: Request, page: int) -> None:
        self.machine.compute([one.key_of(page)], np.array([one.blocks[page]]))

    def come(self) -> None:
        self.came += 1
        prompt = self.chance.randint(1, 20)
        one = Request(self.came, prompt, prompt)
        if (blocks := self.allocate(one.pages)) is not None:
            one.blocks = blocks
            for page in range(one.pages):
                self.compute(one, page)
            self.running.append(one)

    def generate(self, one: Request) -> None:
        if one.tokens % PAGE == 0:
            if (blocks := self.allocate(1)) is None:
                return self.give_way(one)
            one.blocks += blocks
        one.tokens += 1
        return self.compute(one, one.pages - 1)

    def end(self, one: Request) -> None:
        """Ends a request: frees its blocks while its whole pages are copied to host memory."""
        self.running.remove(one)
        self.store(one)
        self.machine.stack.stores.presume()
        self.free(one)

    def abort(self, one: Request) -> None:
        swapped = self.swap.get(str(one.name))
        assert swapped is not None
        self.pending_aborts += swapped.tail is not None and not swapped.tail.ticket.poll()
        self.waiting.remove(one)
        self.swap.drop(str(one.name))

    def store(self, one: Request) -> list[Key]:
        whole = one.tokens // PAGE
        keys = [one.key_of(page) for page in range(whole)]
        self.machine.stack.stores.store(keys, np.array(one.blocks[:whole], np.int64))
        return keys

    def give_way(self, one: Request) -> None:
        self.running.remove(one)
        tail = self.swap.save_tail(one.blocks[-1]) if one.tokens % PAGE else None
        keys = self.store(one)
        self.machine.stack.stores.presume()
        self.swap.out(str(one.name), one.tokens, keys, tail)
        self.free(one)
        self.waiting.append(one)

    def take_back(self, one: Request) -> None:
        """Prepares to resume a request, as if some of its first pages were still on the device."""
        swapped = self.swap.get(str(one.name))
        assert swapped is not None
        first = self.chance.choice([0, 0, self.chance.randint(0, one.tokens // PAGE)])
        readable = self.swap.readable(swapped, first)
        if readable is None:
            self.early += 1
            return
        if readable:
            self.swap.hold(swapped, first)
        else:
            self.swap.drop(str(one.name))
        self.waiting.remove(one)
        self.held.append((one, first))

    def come_back(self, one: Request, first: int) -> None:
        swapped = self.swap.get(str(one.name))
        if (blocks := self.allocate(one.pages)) is None:
            self.swap.let_go(swapped)
            if swapped is not None:
                self.waiting.append(one)
            return
        self.running.append(one)
        one.blocks = blocks
        if swapped is not None:
            for page in range(first):
                self.compute(one, page)
            for ticket in self.swap.load(swapped, np.array(blocks[first:], np.int64)):
                ticket.wait(DEADLINE_S)
            self.swap.drop(str(one.name))
        self.back += swapped is not None
        self.again += swapped is None
        for page in range(one.pages):
            if swapped is None:
                self.compute(one, page)
            assert self.machine.right([one.key_of(page)], np.array([blocks[page]]))

    def check(self) -> None:
        """Checks the KV of running requests and the pages in host memory."""
        for one in self.running:
            for page, block in enumerate(one.blocks):
                assert self.machine.right([one.key_of(page)], np.array([block]))
        host = self.machine.stack.host
        keys = list(host._index)
        assert holds(self.machine.arena, keys, host.places(keys)).all()
        host.check_integrity()
        self.groups.check_integrity()


@pytest.mark.parametrize(("seed", "pages", "failing"), [(0, 96, 0), (1, 24, 0), (2, 96, 5)])
def test_requests_keep_their_kv_while_copies_are_late_or_fail(
    seed: int, pages: int, failing: int
) -> None:
    chance = random.Random(seed)  # noqa: S311
    delayed = DelayedEngine(chance, failing)
    machine = Machine(PAGE, pages, delayed=delayed, keep_after=1 << 30)
    scheduler = Scheduler(machine, delayed, chance, capacity=pages // 2)
    for _ in range(ROUNDS):
        scheduler.step()
        scheduler.check()
    assert scheduler.back > ROUNDS / 20
    assert scheduler.early > ROUNDS / 50
    assert scheduler.pending_aborts
    assert machine.stack.in_flight.waited
    assert bool(scheduler.again) == (pages < BLOCKS or failing > 0)
    for one in [*scheduler.running]:
        scheduler.end(one)
    scheduler.swap.clear()
    delayed.let_happen(len(delayed.pending))
    machine.until(lambda: not machine.stack.stores.in_progress)
    while machine.stack.stores.completed():
        machine.stack.stores.pop()
    machine.until(lambda: not machine.stack.stores._dropped and not machine.stack.host._pinned)
    host = machine.stack.host
    assert host.capacity - host.free == len(host)
    assert scheduler.groups.available == BLOCKS
    assert scheduler.swap._used == 0
    machine.close()
