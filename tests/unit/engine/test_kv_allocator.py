"""Equivalence of our allocator with SGLang's own, behind the same interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from sgl_ext.engine.kv import known
from sgl_ext.engine.kv.allocator import BlockGroupAllocator, runs_of
from sgl_ext.engine.kv.indices import Download

OPERATIONS = 1000
"""Operations for each seed and page size; ``test_block_groups`` has more for the policy alone."""


def stock(size: int, page: int) -> PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator:
    if page == 1:
        return TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", None, False)
    return PagedTokenToKVPoolAllocator(size, page, torch.bfloat16, "cpu", None, False)


def ours(
    size: int, page: int, first_group: int = 40, device: str | torch.device = "cpu"
) -> BlockGroupAllocator:
    return BlockGroupAllocator(
        size, page, torch.bfloat16, device, None, False, expected_tokens=first_group
    )


class Late(Download):
    """Download that lands late, and whose tensor is overwritten as soon as it has begun."""

    chance = Random(0)  # noqa: S311

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values.clone())
        values.fill_(-1)

    def landed(self) -> bool:
        return self.chance.random() < 0.3


@dataclass
class Side:
    """Allocator and the slots that each request has from it."""

    allocator: BlockGroupAllocator | PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def extend(self, requests: dict[int, int]) -> bool:
        """Allocates slots for new tokens; returns False if there is too little room.

        Args:
            requests: number of new tokens, by row.
        """
        before = [self.rows.get(row, torch.empty(0, dtype=torch.int64)) for row in requests]
        prefix = torch.tensor([len(slots) for slots in before])
        new = list(requests.values())
        total = prefix + torch.tensor(new)
        last = torch.tensor([int(slots[-1]) if len(slots) else -1 for slots in before])
        with self._serving(list(requests), new):
            if self.allocator.page_size == 1:
                out = self.allocator.alloc(sum(new))
            else:
                out = self.allocator.alloc_extend(prefix, prefix, total, total, last, sum(new))
        if out is None:
            return False
        assert out.dtype == torch.int64
        for row, slots, part in zip(requests, before, out.split(new), strict=True):
            self.rows[row] = torch.cat((slots, part))
        return True

    def decode(self, rows: list[int]) -> bool:
        total = torch.tensor([len(self.rows[row]) + 1 for row in rows])
        last = torch.tensor([int(self.rows[row][-1]) for row in rows], dtype=torch.int32)
        with self._serving(rows, [1] * len(rows)):
            if self.allocator.page_size == 1:
                out = self.allocator.alloc(len(rows))
            else:
                out = self.allocator.alloc_decode(total, total, last)
        if out is None:
            return False
        for row, slot in zip(rows, out, strict=True):
            self.rows[row] = torch.cat((self.rows[row], slot.view(1)))
        return True

    def _serving(self, rows: list[int], counts: list[int]):
        if isinstance(self.allocator, BlockGroupAllocator):
            return self.allocator.serving(lambda: (rows, counts))
        return torch.no_grad()

    def check(self) -> None:
        """Checks that slots are unique and no padding, pages whole, and the free count right."""
        page, size = self.allocator.page_size, self.allocator.size
        pages = []
        for slots in self.rows.values():
            assert int(slots.min()) >= page
            assert int(slots.max()) < size + page
            starts = slots[::page]
            assert (starts % page == 0).all()
            expected = (starts[:, None] + torch.arange(page)).flatten()[: len(slots)]
            assert torch.equal(slots, expected)
            pages += (starts // page).tolist()
        assert len(set(pages)) == len(pages)
        assert self.allocator.available_size() == size - len(pages) * page
        free = self.allocator.get_all_free_pages()
        assert set(free.tolist()) == set(range(1, size // page + 1)) - set(pages)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_match_sglangs_allocator(
    page: int, seed: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``late``, freed slots come to the host late, as those of a GPU do."""
    if late:
        monkeypatch.setattr(known, "Download", Late)
    random = Random(seed)  # noqa: S311
    size = page * 60
    # Not equal to "cpu", so that the allocator takes it for a device.
    device: str | torch.device = torch.device("cpu") if late else "cpu"
    sides = [Side(ours(size, page, device=device)), Side(stock(size, page))]
    row = 0
    for step in range(OPERATIONS):
        running = list(sides[0].rows)
        match random.choice(["extend", "extend", "decode", "decode", "decode", "free", "group"]):
            case "extend":
                chosen = random.sample(running, min(len(running), random.randrange(3)))
                # SGLang extends after whole pages, or within a request's last page.
                requests = {r: random.randrange(1, 3 * page + 2) for r in chosen}
                requests |= {row + i: random.randrange(1, 5 * page) for i in range(2)}
                row += 2
                outcomes = {side.extend(dict(requests)) for side in sides}
            case "decode" if running:
                chosen = random.sample(running, random.randrange(1, len(running) + 1))
                outcomes = {side.decode(chosen) for side in sides}
            case "free" if running:
                ended = random.choice(running)
                for side in sides:
                    side.allocator.free_segment(side.rows.pop(ended), start_pos=0)
                sides[0].allocator.close_rows([ended])
                outcomes = {True}
            case "group" if running:
                chosen = random.sample(running, random.randrange(1, len(running) + 1))
                for side in sides:
                    side.allocator.free_group_begin()
                    before = side.allocator.available_size()
                    for ended in chosen:
                        side.allocator.free(side.rows.pop(ended))
                    assert side.allocator.available_size() == before
                    side.allocator.free_group_end()
                outcomes = {True}
            case _:
                continue
        assert len(outcomes) == 1, f"step {step}: one could allocate, the other not"
        lengths = [{r: len(slots) for r, slots in side.rows.items()} for side in sides]
        assert lengths[0] == lengths[1]
        sides[0].allocator.groups.check_integrity()
        for side in sides:
            side.check()
    for side in sides:
        side.allocator.clear()
        assert side.allocator.available_size() == size


@pytest.mark.parametrize("page", [1, 16])
def test_a_request_decodes_into_one_run(page: int) -> None:
    side = Side(ours(page * 600, page, first_group=100 * page))
    assert side.extend({1: 30 * page, 2: 20 * page})
    for _ in range(40 * page):
        assert side.decode([2, 1])
    for row in (1, 2):
        pages = side.rows[row][::page] // page
        assert runs_of(pages.numpy()) == [(int(pages[0]), len(pages))]
    theirs = Side(stock(page * 600, page))
    assert theirs.extend({1: 30 * page, 2: 20 * page})
    for _ in range(40 * page):
        assert theirs.decode([2, 1])
    assert len(runs_of(np.unique(theirs.rows[1][::page].numpy() // page))) == 41


def test_slots_are_allocated_without_naming_a_request() -> None:
    allocator = ours(160, 16)
    slots = allocator.alloc(48)
    assert slots.tolist() == list(range(16, 64))
    assert allocator.alloc(160) is None
    assert len(allocator.alloc(40)) == len(stock(160, 16).alloc(40)) == 32
    allocator.free(torch.arange(64, 96))
    allocator.free_page_ids(torch.tensor([1, 3]))
    assert allocator.available_size() == 160 - 16
    assert allocator.alloc(16).tolist() == list(range(16, 32))


def test_owners_that_do_not_match_the_call_are_ignored() -> None:
    allocator = ours(64, 1)
    with allocator.serving(lambda: ([1], [3])):
        assert len(allocator.alloc(5)) == 5
    allocator.groups.check_integrity()
    assert allocator.available_size() == 59


def test_slots_of_an_earlier_part_are_not_taken_for_those_of_the_last() -> None:
    allocator = ours(64, 1)
    with allocator.serving(lambda: ([1, 2], [1, 3])):
        first = allocator.alloc(4)
    assert allocator.known.extended(1).tolist() == first[:1].tolist()
    with allocator.serving(lambda: ([1], [1])):
        last = allocator.alloc(1)
    known = allocator.known.extended(1)
    assert known is None or known.tolist() == last.tolist()


def test_freeing_twice_raises() -> None:
    allocator = ours(64, 1)
    slots = allocator.alloc(4)
    allocator.free(slots)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(slots)
    slots = allocator.alloc(4)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(slots[[0, 1, 2, 1]])
    assert allocator.available_size() == 60
    paged = ours(64, 16)
    paged.alloc(32)
    with pytest.raises(ValueError, match="not in use"):
        paged.free_page_ids(torch.tensor([1, 2, 1]))
    assert paged.available_size() == 32


def test_a_new_highest_block_is_reported_once() -> None:
    allocator = ours(64, 1)
    told: list[int] = []
    allocator.on_allocate = told.append
    first = allocator.alloc(10)
    allocator.free(first)
    allocator.alloc(10)
    allocator.alloc(3)
    assert told == [11, 14]


def test_runs_of_returns_maximal_runs() -> None:
    assert runs_of(np.array([3, 4, 5, 9, 11, 12])) == [(3, 3), (9, 1), (11, 2)]
    assert runs_of(np.array([], dtype=np.int64)) == []
