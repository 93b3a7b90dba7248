"""Loans of memory under every order of lost, duplicated and reordered messages.

Either side may end at any time. No master uses memory that the worker uses itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sgl_ext.memory.lent import Extent
from sgl_ext.memory.mapping import PAGE
from sgl_ext.peer.loan import Borrower, Lender
from sgl_ext.peer.messages import (
    PROTOCOL,
    Keep,
    Lend,
    ProtocolError,
    Refusal,
    RefusedError,
    decode,
    encode,
)

SIZES = (0, PAGE, 2 * PAGE)
GRANTS, WIRE, SESSIONS = 2, 2, 2


def memory(generation: int) -> tuple[Extent, ...]:
    """Returns one generation of a worker's memory; each generation is a different file."""
    return (Extent(name=str(generation), fd=generation, offset=0, size=max(SIZES)),)


def _copy(value: Any) -> Any:
    """Returns a shallow copy, faster than ``copy.copy``: the test makes a million of them."""
    twin = object.__new__(type(value))
    twin.__dict__.update(vars(value))
    return twin


def _fixed(value: object) -> object:
    if isinstance(value, Lend):  # the latest message, which follows from the other attributes
        return None
    return tuple(value) if isinstance(value, deque) else value


class World:
    """State of one worker, of all masters so far, and of the messages in transit."""

    def __init__(self) -> None:
        self.generation = self.grants = self.masters = 0
        self.lender = Lender(b"worker", 1, memory(0))
        self.borrowers: tuple[Borrower | None, ...] = (None,)
        """Loan of each master; None before its first message of the worker and after it has ended.

        All masters but the last have been replaced.
        """
        self.dead: frozenset[int] = frozenset()
        """Indices of the masters whose process has ended."""
        self.wire: frozenset[Lend | Keep] = frozenset()

    def state(self) -> object:
        sides = [self.lender, *self.borrowers]
        known = [side and tuple(map(_fixed, vars(side).values())) for side in sides]
        return self.generation, self.grants, *known, self.dead, self.wire

    def copy(self) -> World:
        """Returns a copy that shares with this object only what never changes."""
        world = _copy(self)
        world.lender = _copy(self.lender)
        world.lender._open = self.lender._open.copy()
        world.borrowers = tuple(each and _copy(each) for each in self.borrowers)
        return world

    def replace_memory(self) -> None:
        """Ends the worker's session, with new memory if a master may be using the old memory."""
        self.generation += self.lender.bound > 0
        self.lender.end(memory(self.generation))

    def die(self, at: int) -> None:
        """Ends a master's process. The worker notices it, and keeps its memory."""
        self.dead |= {at}
        self.borrowers = (*self.borrowers[:at], None, *self.borrowers[at + 1 :])
        if self.lender.master == bytes([at]):
            self.lender.end(memory(self.generation))

    def lender_receives(self, keep: Keep) -> None:
        if self.lender.receive(keep):
            self.replace_memory()
            assert not self.lender.receive(keep)

    def borrower_receives(self, at: int, lend: Lend) -> None:
        if at in self.dead:
            return
        borrower = self.borrowers[at] or Borrower(bytes([at]), 2, 1, lend)
        borrower.receive(lend)
        self.borrowers = (*self.borrowers[:at], borrower, *self.borrowers[at + 1 :])

    def next(self) -> Iterator[World]:
        if self.lender.message.session > SESSIONS:
            return
        if self.lender.master and self.grants < GRANTS:
            for size in SIZES:
                if size != self.lender.granted:
                    world = self.copy()
                    world.lender.grant(size)
                    world.grants += 1
                    yield world
        if self.lender.master:  # a lease or a deadline has expired
            world = self.copy()
            world.replace_memory()
            yield world
        if len(self.borrowers) < 2:  # another master replaces this one, or appears to
            world = self.copy()
            world.borrowers = (*world.borrowers, None)
            yield world
        for at, borrower in enumerate(self.borrowers):
            if borrower is None:
                continue
            world = self.copy()
            world.die(at)
            yield world
            for size in SIZES:
                if size < borrower.used or borrower.used < size <= borrower.size:
                    world = self.copy()
                    world.borrowers[at].used = size  # type: ignore[union-attr]
                    yield world
            if borrower.size:
                world = self.copy()
                world.borrowers[at].silent()  # type: ignore[union-attr]
                yield world
        yield from self._talk()

    def _talk(self) -> Iterator[World]:
        kept = [replace(each.message, used=0) for each in self.borrowers if each]
        sent = {self.lender.message, *kept}
        if len(self.wire) < WIRE:
            for message in sent - self.wire:
                world = self.copy()
                world.wire |= {message}
                yield world
        for message in self.wire:
            lost = self.copy()
            lost.wire -= {message}
            yield lost
            for left in (self.wire, lost.wire):  # a message may arrive again
                for at in range(len(self.borrowers)) if isinstance(message, Lend) else (0,):
                    world = self.copy()
                    world.wire = left
                    if isinstance(message, Lend):
                        world.borrower_receives(at, message)
                    else:
                        world.lender_receives(message)
                    yield world

    def check(self) -> None:
        self.lender.check_integrity()
        for borrower in filter(None, self.borrowers):
            borrower.check_integrity()
        assert 0 <= self.lender.granted <= self.lender.bound <= max(SIZES)
        for borrower in self.borrowers:
            if borrower is not None and borrower.memory == memory(self.generation):
                assert borrower.used <= self.lender.bound, vars(borrower)

    def settle(self) -> None:
        """Checks that both sides agree once messages arrive and the excess is returned."""
        at = len(self.borrowers) - 1
        if at in self.dead:
            return
        for _ in range(4):
            self.borrower_receives(at, self.lender.message)
            borrower = self.borrowers[at]
            assert borrower is not None
            borrower.used = min(borrower.used, borrower.size)
            self.lender_receives(borrower.message)
        assert self.lender.settled
        assert self.lender.master == bytes([at])
        assert borrower.size == self.lender.granted


def test_no_master_uses_unlent_memory_in_any_order_of_events() -> None:
    start = World()
    seen = {start.state()}
    todo = [start]
    while todo:
        world = todo.pop()
        world.check()
        for following in world.next():
            if (state := following.state()) not in seen:
                seen.add(state)
                todo.append(following)
        if len(seen) % 8 == 0:
            world.settle()
    assert len(seen) > 80_000


def test_bound_covers_all_grants_until_the_latest_is_kept() -> None:
    """Changes the grant several times before the master receives a message."""
    lender = Lender(b"worker", 1, memory(0))
    borrower = Borrower(b"master", 2, 1, lender.message)
    assert not lender.receive(borrower.message)
    for pages in (2, 0, 1):
        lender.grant(pages * PAGE)
    assert (lender.granted, lender.bound) == (PAGE, 2 * PAGE)
    borrower.receive(lender.message)
    borrower.used = PAGE
    assert not lender.receive(borrower.message)
    assert lender.settled


def test_a_message_is_made_when_something_changes_only() -> None:
    lender = Lender(b"worker", 1, memory(0))

    def changed() -> bool:
        before, before_that = lender.message, seen[-1]
        seen.append(before)
        assert lender.message is before
        return before != before_that

    seen = [lender.message]
    assert not changed()
    lender.receive(Borrower(b"master", 2, 1, lender.message).message)
    assert changed()
    lender.grant(PAGE)
    assert changed()
    lender.busy = True
    assert changed()
    lender.end(memory(1))
    assert changed()
    assert (lender.message.session, lender.message.memory) == (2, memory(1))


def test_invalid_grants_and_uses_are_refused() -> None:
    lender = Lender(b"worker", 1, memory(0))
    with pytest.raises(ValueError, match="no master"):
        lender.grant(PAGE)
    lender.receive(Borrower(b"master", 2, 1, lender.message).message)
    for size in (-PAGE, 3 * PAGE):
        with pytest.raises(ValueError, match="cannot lend"):
            lender.grant(size)
    lender.grant(2 * PAGE)
    borrower = Borrower(b"master", 2, 1, lender.message)
    with pytest.raises(ValueError, match=f"{3 * PAGE:,} B exceed the {2 * PAGE:,} B"):
        borrower.used = 3 * PAGE


def test_memory_of_a_silent_worker_is_returned_until_its_next_message() -> None:
    lender = Lender(b"worker", 1, memory(0))
    borrower = Borrower(b"master", 2, 1, lender.message)
    lender.receive(borrower.message)
    lender.grant(2 * PAGE)
    borrower.receive(lender.message)
    borrower.used = 2 * PAGE
    borrower.silent()
    assert borrower.excess == 2 * PAGE
    borrower.used = 0
    borrower.receive(lender.message)
    assert borrower.size == 2 * PAGE


def wrong(message: Lend | Keep, **fields: object) -> bytes:
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    return msgspec.msgpack.encode({**plain, **fields})


def test_messages_round_trip_and_invalid_data_is_refused() -> None:
    lender = Lender(b"worker", 1, memory(0))
    borrower = Borrower(b"master", 2, 1, lender.message)
    for message in (lender.message, borrower.message):
        assert decode(encode(message)) == message
    for data, reason in (
        (b"", "invalid message"),
        (b"\xc1", "invalid message"),
        (b"\x91" * 3000, "invalid message"),
        (b"\x81\xa1a" * 3000, "invalid message"),
        (b"\x81\xa1a" + b"\x91" * 3000, "invalid message"),
        (wrong(lender.message, worker=b"w" * 65), "invalid message"),
        (encode(replace(lender.message, protocol=7)), "protocol 7"),
        (wrong(lender.message, size="much"), "invalid message"),
        (wrong(lender.message, size=3 * PAGE), "invalid message"),
        (wrong(lender.message, size=1), "invalid message"),
        (wrong(lender.message, number=-1), "invalid message"),
        (wrong(lender.message, pid=0), "invalid message"),
        (wrong(borrower.message, block=0), "invalid message"),
        (encode(lender.message).replace(b"size", b"\xff\xffze"), "invalid message"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            decode(data)


@pytest.mark.parametrize("protocol", [PROTOCOL, 7])
def test_refusals_of_any_protocol_version_are_decoded(protocol: int) -> None:
    with pytest.raises(RefusedError, match=r"does not understand the messages .*: it is too old"):
        decode(encode(Refusal("it is too old", protocol)))
