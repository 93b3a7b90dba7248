"""Order of eviction from host memory: by the number of uses and the time since the last one."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from sgl_ext.tiers.host import HostPages

PROMPTS = 2000


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def visit(host: HostPages, names: list[bytes]) -> int:
    """Uses the pages of a prompt, stores the others, and returns how many were there."""
    there = host.lookup(names)
    host.use(names[:there])
    missing = [names[at] for at in host.missing(names)]
    pages = host.reserve(len(missing))
    assert pages is not None
    host.publish(missing, pages)
    return there


def fresh(count: int) -> list[list[bytes]]:
    """Returns prompts of one page each that are used once."""
    return [keys(1_000_000 + number) for number in range(count)]


def test_pages_that_were_used_more_often_outlast_a_scan() -> None:
    host = HostPages(8)
    often, once = keys(1, 2), keys(3, 4)
    for _ in range(4):
        visit(host, often)
    visit(host, once)
    for prompt in fresh(100):  # few pages are used again
        visit(host, prompt)
    assert host.lookup(often) == 2
    assert host.missing(once) == [0, 1]


def test_pages_that_are_not_used_any_more_leave() -> None:
    host = HostPages(8)
    for _ in range(4):
        visit(host, keys(1, 2))
    for prompt in fresh(2000):
        visit(host, prompt)
        visit(host, prompt)  # so that most pages are used again
    assert host.missing(keys(1, 2)) == [0, 1]


def test_the_least_recently_used_of_equally_used_pages_leaves() -> None:
    host = HostPages(3)
    visit(host, keys(1))
    visit(host, keys(2))
    visit(host, keys(3))
    for name in (2, 3, 1):
        visit(host, keys(name))
    visit(host, keys(4))
    assert host.missing(keys(1, 2, 3)) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_no_page_leaves_before_those_behind_it(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    host = HostPages(64)
    chats = [keys(*range(chat * 100, chat * 100 + 12)) for chat in range(12)]
    shared = keys(*range(5000, 5004))
    for _ in range(PROMPTS):
        chat = chance.choice(chats[: chance.randint(1, len(chats))])
        names = shared + chat[: chance.randint(1, len(chat))]
        visit(host, names)
        host.use(names)
        for each in chats:
            prompt = shared + each
            assert host.lookup(prompt) == len(host.present(prompt))
        host.check_integrity()


def test_more_pages_are_found_than_with_the_least_recently_used_order() -> None:
    """Four of ten prompts are about few documents, and the others come once."""
    chance = random.Random(0)  # noqa: S311
    documents = [keys(*range(at * 10, at * 10 + 8)) for at in range(12)]
    prompts = [
        chance.choice(documents)
        if chance.random() < 0.4
        else keys(*range(10_000 + at * 10, 10_008 + at * 10))
        for at in range(PROMPTS)
    ]
    host, recent, hits = HostPages(96), OrderedDict[bytes, None](), 0
    found = 0
    for prompt in prompts:
        found += visit(host, prompt)
        hits += sum(name in recent for name in prompt)
        for name in reversed(prompt):
            recent[name] = None
            recent.move_to_end(name)
        while len(recent) > 96:
            recent.popitem(last=False)
    assert found > 1.5 * hits > 0
