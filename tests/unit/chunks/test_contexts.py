"""Contexts are found by id and text, by their own tenant only, until they expire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_ext.chunks.contexts import Context, Contexts
from sgl_ext.errors import ExtError, UnknownContextError

LIMIT, MOST_PINNED = 12, 4
SALTS = st.sampled_from([None, "a", "b"])
TEXTS = st.sampled_from("stuvwxyz")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Tenants(RuleBasedStateMachine):
    """Random calls of the registry, compared with a list that is searched linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.contexts = Contexts(limit=LIMIT, clock=self.clock)
        self.model: list[Context] = []
        self.gone: list[Context] = []
        self.created: list[Context] = []
        for _ in range(LIMIT - 2):
            self.add(None, None, None)

    def drop(self, which: list[Context]) -> None:
        self.gone += which
        self.model = [one for one in self.model if one not in which]

    @rule(text=TEXTS | st.none(), salt=SALTS, ttl=st.none() | st.integers(1, 9))
    def create(self, text: str | None, salt: str | None, ttl: int | None) -> None:
        self.add(text, salt, ttl)

    def add(self, text: str | None, salt: str | None, ttl: int | None) -> None:
        made = self.contexts.create((1, 2), method="naive", text=text, salt=salt, ttl=ttl)
        assert made.expires == (None if ttl is None else self.clock.now + ttl)
        self.model.append(made)
        self.created.append(made)
        if len(self.model) > LIMIT:
            self.drop([next(one for one in self.model if not one.pinned)])

    @rule(number=st.integers(0, 20), salt=SALTS)
    def get(self, number: int, salt: str | None) -> None:
        known = self.model + self.gone
        if not known:
            return
        wanted = known[number % len(known)]
        if wanted in self.model and wanted.salt == salt:
            assert self.contexts.get(wanted.id, salt) == wanted
            self.touch(wanted)
        else:
            with pytest.raises(UnknownContextError, match="create it again"):
                self.contexts.get(wanted.id, salt)
            with pytest.raises(UnknownContextError):
                self.contexts.delete(wanted.id, salt)
            with pytest.raises(UnknownContextError):
                self.contexts.pin(wanted.id, salt, pinned=True)

    def touch(self, context: Context) -> None:
        self.model.remove(context)
        self.model.append(context)

    @rule(text=TEXTS, salt=SALTS)
    def find(self, text: str, salt: str | None) -> None:
        same = [
            one
            for one in self.created
            if one in self.model and (one.salt, one.text) == (salt, text)
        ]
        assert self.contexts.find(text, salt) == (same[-1] if same else None)
        if same:
            self.touch(same[-1])

    @rule(number=st.integers(0, 20))
    def delete(self, number: int) -> None:
        if self.model:
            wanted = self.model[number % len(self.model)]
            self.contexts.delete(wanted.id, wanted.salt)
            self.drop([wanted])

    @rule(number=st.integers(0, 20), pinned=st.booleans())
    def pin(self, number: int, pinned: bool) -> None:
        if not self.model:
            return
        wanted = self.model[number % len(self.model)]
        full = sum(one.pinned for one in self.model) == MOST_PINNED
        if pinned and not wanted.pinned and full:
            with pytest.raises(ExtError, match=f"maximum of {MOST_PINNED} pinned contexts"):
                self.contexts.pin(wanted.id, wanted.salt, pinned=True)
            self.touch(wanted)
            return
        made = self.contexts.pin(wanted.id, wanted.salt, pinned=pinned)
        assert made == replace(wanted, pinned=pinned)
        self.created[self.created.index(wanted)] = made
        self.model.remove(wanted)
        self.model.append(made)

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        now = self.clock.now
        self.drop([one for one in self.model if one.expires is not None and one.expires <= now])

    @invariant()
    def the_same(self) -> None:
        assert len(self.contexts) == len(self.model)
        assert self.contexts.pinned == sum(one.pinned for one in self.model)
        for salt in (None, "a", "b"):
            assert self.contexts.all(salt) == [one for one in self.model if one.salt == salt]


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_ids_cannot_be_guessed() -> None:
    contexts = Contexts(limit=1000, clock=Clock())
    ids = {contexts.create((n,), method="naive").id for n in range(1000)}
    assert len(ids) == 1000
    assert min(map(len, ids)) >= 25


def test_pinned_contexts_stay_beyond_the_limit_until_they_are_unpinned() -> None:
    contexts = Contexts(limit=10, clock=Clock())
    pinned = [contexts.create((n,), method="naive") for n in range(2)]
    for each in pinned:
        contexts.pin(each.id, pinned=True)
    later = [contexts.create((n,), method="naive").id for n in range(20)]
    assert [each.id for each in contexts.all()] == [each.id for each in pinned] + later[-8:]
    contexts.pin(pinned[0].id, pinned=False)
    for n in range(9):
        contexts.create((n,), method="naive")
    assert pinned[0].id not in contexts
    assert pinned[1].id in contexts


def test_pinned_contexts_expire_and_can_be_deleted() -> None:
    clock = Clock()
    contexts = Contexts(limit=9, clock=clock)
    for deleted in (True, False):
        context = contexts.create((1,), method="naive", ttl=5)
        contexts.pin(context.id, pinned=True)
        with pytest.raises(ExtError, match=r"of 1 pinned contexts .chunks\.limit = 9. is"):
            contexts.pin(contexts.create((2,), method="naive").id, pinned=True)
        if deleted:
            contexts.delete(context.id)
        else:
            clock.now += 5
        assert context.id not in contexts
        assert contexts.pinned == 0


def test_expired_contexts_leave_no_entries() -> None:
    clock = Clock()
    contexts = Contexts(limit=10, clock=clock)
    for n in range(100):
        contexts.create((n,), method="naive", text=str(n), ttl=1)
        clock.now += 0.5
    clock.now += 1
    assert len(contexts) == 0
    assert not contexts._by_text
    assert not contexts._unpinned
    assert not contexts._expiry


def test_contexts_with_equal_prefixes_share_one_copy() -> None:
    contexts = Contexts(limit=100, clock=Clock())
    behind = list(range(1000))
    one, other = (contexts.create((n,), method="primed", before=list(behind)) for n in range(2))
    assert one.before is other.before
    contexts.delete(one.id)
    assert other.before == tuple(behind)
    contexts.delete(other.id)
    assert not contexts._before
    assert not contexts._sharing


def test_expiry_heap_stays_small_when_contexts_are_deleted() -> None:
    contexts = Contexts(limit=10, clock=Clock())
    kept = contexts.create((0,), method="naive", ttl=1000)
    for n in range(1000):
        contexts.delete(contexts.create((n,), method="naive", ttl=500).id)
    assert len(contexts._expiry) < 100
    assert kept.id in contexts


class Kept:
    """Keeper that has everything."""

    def all(self) -> list[tuple[Context, float | None]]:
        return []

    def add(self, _context: Context, _ttl: float | None) -> None: ...

    update = add

    def remove(self, _id: str) -> None: ...


def test_changes_are_undone_in_their_order() -> None:
    clock = Clock()
    contexts = Contexts(limit=10, clock=clock, keeper=Kept())
    one, two, three = (contexts.create((n,), method="naive", text=f"{n}") for n in range(3))
    short = contexts.create((4,), method="naive", ttl=5)
    other = contexts.create((5,), method="naive", keep=False)
    contexts.pin(one.id, pinned=True)
    assert contexts.take_changes().keys() == {each.id for each in (one, two, three, short, other)}
    contexts.limit = 4
    clock.now += 6
    contexts.pin(one.id, pinned=False)
    made = contexts.create((6,), method="naive")
    contexts.delete(three.id)
    contexts.delete(other.id)
    contexts.limit = 1
    contexts._evict()
    assert contexts.all() == [made]
    contexts.undo(contexts.take_changes())
    assert contexts.take_changes() == {}
    contexts.limit = 10
    assert {each.id for each in contexts.all()} == {one.id, two.id, three.id}  # short has expired
    assert contexts.pinned == 1
    assert contexts.get(one.id).pinned
    assert contexts.find("1") == two
    assert contexts.tokens == 3
    contexts.take_changes()
    same = contexts.create((7,), method="naive", text="1")
    contexts.take_changes()
    contexts.delete(two.id)
    probe = contexts.create((8,), method="naive", keep=False)
    contexts.undo(contexts.take_changes())
    assert contexts.find("1") == same
    assert two.id in contexts
    assert probe.id not in contexts


def test_an_empty_salt_is_none() -> None:
    contexts = Contexts(limit=9, clock=Clock())
    made = contexts.create((1,), method="naive", text="text", salt="")
    assert made.salt is None
    assert contexts.get(made.id) is contexts.get(made.id, "") is contexts.find("text", "")
    assert contexts.all("") == contexts.all() == [made]
