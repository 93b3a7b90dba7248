"""Block group allocator: placement by example, the rest against a model of sets of blocks."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_ext.memory.block_groups import BlockGroups, Run


def one(groups: BlockGroups, owner: int | None, blocks: int) -> list[Run]:
    result = groups.allocate([(owner, blocks)])
    groups.check_integrity()
    assert result is not None
    return result[0]


def blocks_of(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [block for start, length in runs for block in range(start, start + length)]


def fragmented(holes: list[int], **options: int) -> BlockGroups:
    """Returns an allocator with free runs of these lengths in order, a used block after each."""
    groups = BlockGroups(sum(holes) + len(holes), **options)
    one(groups, None, groups.blocks)
    position = groups.first
    for hole in holes:
        groups.release([(position, hole)])
        position += hole + 1
    return groups


def test_a_fresh_pool_is_one_free_group() -> None:
    groups = BlockGroups(100)
    assert groups.free_runs() == [(1, 100)]
    assert (groups.available, groups.used, groups.tail_free) == (100, 0, 100)
    groups.check_integrity()


def test_the_first_group_has_the_expected_size() -> None:
    groups = BlockGroups(10_000)
    assert groups.expected == 63  # 1,000 tokens
    assert BlockGroups(10, page=1).expected == 1000
    assert one(groups, 7, 5) == [(1, 5)]
    assert groups.unused_runs() == {7: (6, 58)}
    assert one(groups, 8, 100) == [(64, 100)]  # larger than expected: the requested size
    assert groups.available == 10_000 - 105


def test_a_request_grows_in_place() -> None:
    groups = BlockGroups(10_000)
    one(groups, 0, 5)
    one(groups, 1, 5)
    assert [groups.append([0, 1]) for _ in range(3)] == [[6, 69], [7, 70], [8, 71]]
    assert one(groups, 0, 10) == [(9, 10)]


def test_an_exhausted_group_is_extended_at_its_end() -> None:
    groups = BlockGroups(10_000)
    one(groups, 0, 100)
    assert groups.append([0]) == [101]
    assert groups.unused_runs() == {0: (102, 62)}
    one(groups, 1, 100)
    assert one(groups, 0, 70) == [(102, 62), (264, 8)]  # then elsewhere: blocks of owner 1 follow


def test_an_allocation_without_owner_has_no_unused_part() -> None:
    groups = BlockGroups(1000)
    one(groups, None, 5)
    assert groups.unused_runs() == {}
    assert groups.free_runs() == [(6, 995)]


def test_unused_parts_shrink_with_the_available_blocks() -> None:
    groups = BlockGroups(100)
    for owner in range(4):
        one(groups, owner, 1)
    assert groups.unused_runs() == {0: (2, 48), 1: (51, 23), 2: (75, 15), 3: (91, 10)}
    for owner in range(4, 40):
        one(groups, owner, 1)
    assert groups.available == 60
    for owner in range(60):
        one(groups, 100 + owner, 1)
    assert groups.available == 0
    assert groups.append([0]) is None


def test_low_addresses_are_preferred_while_many_blocks_are_available() -> None:
    groups = fragmented([20, 10, 30])
    assert one(groups, None, 8) == [(1, 8)]
    assert one(groups, None, 25) == [(33, 25)]


def test_the_best_fit_is_preferred_while_few_blocks_are_available() -> None:
    groups = BlockGroups(1000)
    one(groups, None, 1000)
    for hole in ((1, 20), (100, 10), (200, 30), (300, 10)):
        groups.release([hole])
    assert one(groups, None, 8) == [(100, 8)]
    assert one(groups, None, 10) == [(300, 10)]
    assert one(groups, None, 25) == [(200, 25)]


def test_unused_parts_are_split_before_a_request_is_fragmented() -> None:
    groups = BlockGroups(100, expected_tokens=16 * 40)
    one(groups, 0, 2)
    assert groups.unused_runs() == {0: (3, 38)}
    assert one(groups, None, 50) == [(41, 50)]
    assert groups.free_runs() == [(91, 10)]
    assert one(groups, 1, 12) == [(22, 12)]  # the rear half of the unused part
    assert groups.unused_runs() == {0: (3, 19), 1: (34, 7)}
    assert groups.append([0, 1]) == [3, 34]


def test_a_large_request_takes_the_largest_groups() -> None:
    groups = fragmented([3, 9, 5, 4])
    assert one(groups, None, 16) == [(5, 9), (15, 5), (1, 2)]
    assert groups.free_runs() == [(3, 1), (21, 4)]


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    groups = BlockGroups(100)
    one(groups, 0, 10)
    before = copy.deepcopy((groups.free_runs(), groups.unused_runs(), groups.available))
    assert groups.allocate([(0, 30), (1, 30), (None, 31)]) is None
    assert groups.append([0] * 91) is None
    assert (groups.free_runs(), groups.unused_runs(), groups.available) == before
    got = groups.allocate([(0, 30), (1, 30), (None, 30)])
    assert got is not None
    assert sorted(blocks_of(chain(*got))) == list(range(11, 101))
    groups.check_integrity()
    assert groups.allocate([]) == []
    assert groups.allocate([(5, 0)]) == [[]]
    with pytest.raises(ValueError, match="cannot allocate -1 blocks"):
        groups.allocate([(0, 0), (1, -1)])


def test_freed_blocks_merge() -> None:
    groups = BlockGroups(30)
    one(groups, None, 30)
    groups.release([(11, 5), (21, 5)])
    groups.release([(16, 5)])
    assert groups.free_runs() == [(11, 15)]
    groups.release([(1, 10), (26, 5)])
    assert groups.free_runs() == [(1, 30)]
    groups.check_integrity()


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([(5, 10), (30, 2)], "cannot release 2 blocks from 30: block 31 is not in use"),
        ([(5, 10), (14, 1)], "block 14 is not in use; was it released twice"),
        ([(20, 1), (20, 1)], "block 20 is not in use"),
        ([(1, 3), (0, 1)], "cannot release 1 blocks from 0: the pool has blocks 1 to 100"),
        ([(95, 7)], "the pool has blocks 1 to 100"),
        ([(7, -1)], "the pool has blocks 1 to 100"),
    ],
)
def test_an_invalid_release_changes_nothing(runs: list[tuple[int, int]], problem: str) -> None:
    groups = BlockGroups(100)
    one(groups, 0, 30)
    before = copy.deepcopy((groups.free_runs(), groups.unused_runs(), groups.available))
    with pytest.raises(ValueError, match=problem):
        groups.release(runs)
    groups.check_integrity()
    assert (groups.free_runs(), groups.unused_runs(), groups.available) == before
    groups.release([(1, 30)])
    with pytest.raises(ValueError, match="block 1 is not in use"):
        groups.release([(1, 30)])


def test_blocks_can_be_freed_before_their_owner_ends() -> None:
    groups = BlockGroups(10_000)
    runs = one(groups, 0, 20)
    groups.release([(1, 5)])  # the radix tree evicts a prefix
    groups.release([(6, 15)])  # up to the unused part
    groups.check_integrity()
    assert groups.available == 10_000
    assert groups.append([0]) == [21]  # the unused part still belongs to the owner
    groups.close(0)
    groups.close(0)
    groups.check_integrity()
    assert groups.free_runs() == [(1, 20), (22, 9979)]
    with pytest.raises(ValueError, match="not in use"):
        groups.release(runs)


def test_blocks_stay_in_use_after_their_owner_is_closed() -> None:
    groups = BlockGroups(10_000)
    one(groups, 0, 20)
    groups.close(0)
    assert groups.free_runs() == [(21, 9980)]
    assert one(groups, 0, 1) == [(21, 1)]  # another request in the same request pool row
    groups.release([(1, 21)])
    assert groups.available == 10_000


def test_the_tail_can_be_removed_and_added() -> None:
    groups = BlockGroups(100, capacity=120)
    one(groups, None, 40)
    assert groups.tail_free == 60
    assert not groups.shrink(61)
    assert groups.shrink(60)
    assert (groups.blocks, groups.available, groups.tail_free) == (40, 0, 0)
    assert groups.append([0]) is None
    groups.grow(70)
    assert groups.free_runs() == [(41, 70)]
    groups.grow(10)
    with pytest.raises(
        ValueError, match="cannot grow by 1 blocks: the pool has 120 of at most 120"
    ):
        groups.grow(1)
    with pytest.raises(ValueError, match="cannot shrink by -1 blocks"):
        groups.shrink(-1)
    assert groups.free_runs() == [(41, 80)]
    groups.check_integrity()


def test_shrinking_removes_unused_parts_in_the_tail() -> None:
    groups = BlockGroups(100, expected_tokens=160)
    one(groups, 0, 3)
    one(groups, 1, 3)
    assert groups.unused_runs() == {0: (4, 7), 1: (14, 7)}
    assert groups.tail_free == 87
    assert groups.shrink(84)
    groups.check_integrity()
    assert groups.unused_runs() == {0: (4, 7), 1: (14, 3)}
    groups.release([(11, 3)])
    assert groups.tail_free == 13
    assert groups.shrink(12)
    groups.check_integrity()
    assert groups.unused_runs() == {0: (4, 1)}
    assert groups.append([0]) == [4]
    assert groups.append([1]) is None
    groups.grow(4)
    assert groups.append([0, 1]) == [5, 6]
    groups.check_integrity()


def test_resizing_does_not_touch_the_block_states() -> None:
    groups = BlockGroups(1_000_000, capacity=1_000_100)
    usage = groups._state
    before = bytes(usage)
    groups.grow(100)
    assert groups.shrink(600)
    assert groups._state is usage
    assert bytes(usage) == before
    assert groups.free_runs() == [(1, 999_500)]


def test_clear_frees_all_blocks_and_unused_parts() -> None:
    groups = BlockGroups(100, capacity=200)
    one(groups, 0, 10)
    groups.grow(50)
    groups.clear()
    groups.check_integrity()
    assert groups.free_runs() == [(1, 150)]
    assert groups.unused_runs() == {}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"blocks": -1}, "-1, must not be negative"),
        ({"blocks": 5, "capacity": 4}, "5, must not be negative or exceed the capacity of 4"),
        ({"blocks": 5, "page": 0}, r"page \(0\)"),
        ({"blocks": 5, "expected_tokens": 0}, r"expected_tokens \(0\)"),
        ({"blocks": 5, "first": -1}, r"first \(-1\)"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        BlockGroups(**arguments)


def break_in_use(groups: BlockGroups) -> None:
    groups._state[3] ^= 1


def break_beyond(groups: BlockGroups) -> None:
    groups._state[0] = 1


def break_available(groups: BlockGroups) -> None:
    groups.available += 1


def break_unused(groups: BlockGroups) -> None:
    groups._active[0].next -= 1


def break_unused_index(groups: BlockGroups) -> None:
    groups._unused_ends.clear()


def break_lending_heap(groups: BlockGroups) -> None:
    groups._longest_unused.clear()


def break_merging(groups: BlockGroups) -> None:
    free = groups._free
    start, length = next(iter(free.length_at.items()))
    free.take(start, length)
    free.length_at |= {start: 1, start + 1: length - 1}
    free.start_of |= {start + 1: start, start + length: start + 1}


def break_free_ends(groups: BlockGroups) -> None:
    groups._free.start_of.popitem()


def break_lengths(groups: BlockGroups) -> None:
    groups._free._lengths.append(10**6)


def break_starts(groups: BlockGroups) -> None:
    next(iter(groups._free._starts.values())).clear()


@pytest.mark.parametrize(
    "sabotage",
    [
        break_in_use,
        break_beyond,
        break_available,
        break_unused,
        break_unused_index,
        break_lending_heap,
        break_merging,
        break_free_ends,
        break_lengths,
        break_starts,
    ],
)
def test_check_integrity_detects_corrupted_state(sabotage: object) -> None:
    groups = BlockGroups(100)
    one(groups, 0, 5)
    one(groups, None, 5)
    groups.release([(2, 2)])
    groups.check_integrity()
    sabotage(groups)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=r"\w"):
        groups.check_integrity()


class Model:
    """Model of an allocator: a set of blocks in use, which is compared with it after each step."""

    def __init__(self, blocks: int, capacity: int, expected: int) -> None:
        self.real = BlockGroups(blocks, page=1, capacity=capacity, expected_tokens=expected)
        self.end, self.capacity = blocks, capacity
        self.in_use: set[int] = set()
        self.absent: set[int] = set()
        self.last: dict[int, int] = {}  # owner -> its latest block

    @property
    def blocks(self) -> int:
        return self.end - len(self.absent)

    @property
    def available(self) -> int:
        return self.blocks - len(self.in_use)

    def allocate(self, requests: list[tuple[int | None, int]]) -> None:
        expected = self._next_blocks(requests[0])
        most_runs = self._most_runs(requests[0])
        before = self._state()
        results = self.real.allocate(requests)
        if sum(blocks for _, blocks in requests) > self.available:
            assert results is None
            assert self._state() == before
            return
        assert results is not None
        for (owner, blocks), runs in zip(requests, results, strict=True):
            assert all(length > 0 for _, length in runs)
            assert len(blocks_of(runs)) == blocks
            assert all(a.start + a.length != b.start for a, b in pairwise(runs))
            self._take(owner, blocks_of(runs))
        if requests[0][1]:
            assert results[0][0].start in expected
            assert len(results[0]) <= most_runs

    def append(self, owners: list[int]) -> None:
        expected = self._next_blocks((owners[0], 1)) if owners else ()
        before = self._state()
        blocks = self.real.append(owners)
        if len(owners) > self.available:
            assert blocks is None
            assert self._state() == before
            return
        assert blocks is not None
        assert len(blocks) == len(owners)
        for owner, block in zip(owners, blocks, strict=True):
            self._take(owner, [block])
        assert not blocks or blocks[0] in expected

    def release(self, blocks: list[int]) -> None:
        runs = [(block, 1) for block in blocks]
        for position in range(len(runs) - 1, 0, -1):  # merges adjacent blocks into one run
            (start, _), (behind, length) = runs[position - 1 : position + 1]
            if behind == start + 1:
                runs[position - 1 : position + 1] = [(start, length + 1)]
        if self.in_use.issuperset(blocks) and len(set(blocks)) == len(blocks):
            self.real.release(runs)
            self.in_use.difference_update(blocks)
            return
        before = self._state()
        with pytest.raises(ValueError, match="cannot release"):
            self.real.release(runs)
        assert self._state() == before

    def close(self, owner: int) -> None:
        self.real.close(owner)
        self.last.pop(owner, None)
        assert owner not in self.real.unused_runs()

    def shrink(self, blocks: int) -> None:
        tail = self.end - max(self.in_use | self.absent, default=0)
        assert self.real.tail_free == tail
        before = self._state()
        assert self.real.shrink(blocks) == (blocks <= tail)
        if blocks <= tail:
            self.end -= blocks
        else:
            assert self._state() == before

    def grow(self, blocks: int) -> None:
        if self.end + blocks <= self.capacity:
            self.real.grow(blocks)
            self.end += blocks
            return
        with pytest.raises(ValueError, match="cannot grow"):
            self.real.grow(blocks)

    def withdraw(self, start: int, end: int) -> None:
        blocks = set(range(start, end))
        assert self.real.withdraw(start, end) == len(blocks & self.in_use)
        self.absent |= blocks - self.in_use

    def restore(self, start: int, end: int) -> None:
        self.real.restore(start, end)
        self.absent -= set(range(start, end))

    def clear(self) -> None:
        self.real.clear()
        self.in_use.clear()
        self.last.clear()

    def check(self) -> None:
        self.real.check_integrity()
        assert (self.real.blocks, self.real.available) == (self.blocks, self.available)
        assert self.real.unused_runs().keys() <= self.last.keys()
        reachable = blocks_of([*self.real.free_runs(), *self.real.unused_runs().values()])
        there = range(1, self.end + 1)
        assert sorted(reachable) == [b for b in there if b not in self.in_use | self.absent]

    def _take(self, owner: int | None, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks)
        assert self.in_use.isdisjoint(blocks)
        assert all(1 <= block <= self.end for block in blocks)
        assert self.absent.isdisjoint(blocks)
        self.in_use.update(blocks)
        if owner is not None and blocks:
            self.last[owner] = blocks[-1]

    def _next_blocks(self, request: tuple[int | None, int]) -> range | tuple[int]:
        """Returns where the request's first block may lie: after its last one, if possible."""
        owner = request[0]
        if owner is not None and owner in self.last:
            unused = self.real.unused_runs().get(owner)
            if unused is not None:
                assert unused.start == self.last[owner] + 1
                return (unused.start,)
            behind = self.last[owner] + 1
            if self.last[owner] in self.in_use and behind in dict(self.real.free_runs()):
                return (behind,)
        return range(1, self.end + 1)

    def _most_runs(self, request: tuple[int | None, int]) -> int:
        """Returns the most runs allowed: for a request without a group, the fewest possible."""
        owner, blocks = request
        if owner in self.last:
            return blocks
        pieces = [length for _, length in self.real.free_runs()]
        pieces += [length for _, length in self.real.unused_runs().values()]
        for count, piece in enumerate(sorted(pieces, reverse=True), 1):
            blocks -= piece
            if blocks <= 0:
                return count
        return self.blocks

    def _state(self) -> object:
        real = self.real
        return real.free_runs(), real.unused_runs(), real.available, bytes(real._state)


LIVES, OPERATIONS = 40, 1000


def test_withdrawn_blocks_are_removed_from_unused_parts_and_free_groups() -> None:
    groups = BlockGroups(100, page=1, expected_tokens=20)
    one(groups, 7, 5)
    assert groups.unused_runs() == {7: (6, 15)}
    assert groups.withdraw(10, 30) == 0
    groups.check_integrity()
    assert groups.unused_runs() == {7: (6, 4)}
    assert groups.free_runs() == [(30, 71)]
    assert (groups.blocks, groups.available, groups.used) == (80, 75, 5)
    assert groups.withdraw(4, 6) == 2
    with pytest.raises(ValueError, match="block 10 is withdrawn"):
        groups.release([(10, 1)])
    with pytest.raises(ValueError, match="blocks 90 to 101 do not exist"):
        groups.withdraw(90, 102)
    groups.clear()
    groups.check_integrity()
    assert groups.free_runs() == [(1, 9), (30, 71)]
    assert groups.withdraw(50, 52) == 0
    groups.restore(5, 60)
    groups.check_integrity()
    assert groups.free_runs() == [(1, 100)]


def test_near_blocks_are_preferred() -> None:
    groups = BlockGroups(100, page=1, expected_tokens=10, near=40)
    groups.withdraw(41, 42)  # near and far free groups never merge
    one(groups, None, 40)
    groups.release([(3, 2), (20, 4)])
    assert one(groups, 1, 4) == [(20, 4)]
    assert one(groups, 2, 5) == [(3, 2), (42, 3)]
    groups.release([(30, 1)])
    assert one(groups, 3, 1) == [(30, 1)]


@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(8, 47),
    expected=st.sampled_from([1, 4, 12, 100]),
    owners=st.integers(1, 7),
    largest=st.sampled_from([3, 8, 47]),
)
@settings(max_examples=LIVES, derandomize=True, deadline=None)
def test_random_operations_agree_with_the_model(
    seed: int, blocks: int, expected: int, owners: int, largest: int
) -> None:
    """Runs 40,000 operations in total, on pools that are nearly full most of the time."""
    choose = random.Random(seed)  # noqa: S311
    model = Model(blocks, blocks + 8, expected)
    for _ in range(OPERATIONS):
        action = choose.random()
        some = min(len(model.in_use), choose.randrange(1, 12))
        if action < 0.25:
            requests: list[tuple[int | None, int]] = [
                (choose.choice([None, *range(owners)]), choose.randrange(largest + 1))
                for _ in range(choose.choice([1, 1, 2, 3]))
            ]
            model.allocate(requests)
        elif action < 0.55:
            model.append(choose.sample(range(owners), choose.randrange(owners + 1)))
        elif action < 0.72:
            model.release(choose.sample(sorted(model.in_use), some))
        elif action < 0.85:  # a range: its blocks in use, or all of its blocks
            start = choose.randrange(1, blocks)
            stretch = range(start, min(start + some, model.end + 1))
            only = action < 0.83
            model.release([block for block in stretch if block in model.in_use or not only])
        elif action < 0.90:
            model.close(choose.randrange(owners))
        elif action < 0.92 and model.end:
            start = choose.randrange(1, model.end + 1)
            end = min(start + choose.randrange(6), model.end + 1)
            (model.restore if start in model.absent else model.withdraw)(start, end)
        elif action < 0.955:
            model.shrink(choose.randrange(8))
        elif action < 0.999:
            model.grow(choose.randrange(8))
        else:
            model.clear()
        model.check()


def test_stale_index_entries_of_free_groups_are_dropped() -> None:
    """Creates and fills hundreds of free groups of one length."""
    choose = random.Random(0)  # noqa: S311
    groups = BlockGroups(3000, page=1, expected_tokens=1)
    one(groups, None, 3000)
    holes: set[int] = set()
    for step in range(6000):
        block = 1 + 3 * choose.randrange(1000)
        if block not in holes:
            groups.release([(block, 1)])
            holes.add(block)
        else:  # the hole is widened, then filled
            groups.release([(block + 1, 1)])
            while (block, 2) in groups.free_runs():
                ((start, _),) = one_unchecked(groups, 2)
                holes.remove(start)
        if step % 50 == 0:
            groups.check_integrity()
            assert {start for start, _ in groups.free_runs()} == holes
    entries = sum(map(len, groups._free._starts.values()))
    assert entries <= 3 * len(groups.free_runs()) + 65


def one_unchecked(groups: BlockGroups, blocks: int) -> list[Run]:
    result = groups.allocate([(None, blocks)])
    assert result is not None
    return result[0]


class Lives(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(0, 40), spare=st.integers(0, 8), expected=st.sampled_from([1, 5, 100])
    )
    def start(self, blocks: int, spare: int, expected: int) -> None:
        self.model = Model(blocks, blocks + spare, expected)

    @rule(
        requests=st.lists(
            st.tuples(st.none() | st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=3
        )
    )
    def allocate(self, requests: list[tuple[int | None, int]]) -> None:
        self.model.allocate(requests)

    @rule(owners=st.lists(st.integers(0, 3), max_size=5))
    def append(self, owners: list[int]) -> None:
        self.model.append(owners)

    @rule(blocks=st.lists(st.integers(0, 50), max_size=8))
    def release(self, blocks: list[int]) -> None:
        self.model.release(blocks)

    @rule(start=st.integers(1, 50), length=st.integers(1, 30))
    def release_a_stretch(self, start: int, length: int) -> None:
        stretch = range(start, start + length)
        self.model.release([block for block in stretch if block in self.model.in_use])

    @rule(owner=st.integers(0, 3))
    def close(self, owner: int) -> None:
        self.model.close(owner)

    @rule(blocks=st.integers(0, 8))
    def shrink(self, blocks: int) -> None:
        self.model.shrink(blocks)

    @rule(blocks=st.integers(0, 8))
    def grow(self, blocks: int) -> None:
        self.model.grow(blocks)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
