"""Block groups: few, large, contiguous runs of KV blocks for each request (FastSwitch §3.1).

A swap costs one copy for each contiguous run, so the blocks of a request are kept together. A
request gets a *group* that is larger than what it asked for, and grows into the unused part of its
latest (*active*) group. The unused part is a hint and no reservation: when no free group is large
enough, it is split and given to other requests. Released blocks return to free groups, which always
merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import index
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.free_groups import FreeGroups

EXPECTED_TOKENS = 1000
"""Size of a new group where there is room, in tokens (FastSwitch §3.1: 60 blocks of 16)"""

_FITS = 16  # lengths of free groups among which the lowest address is chosen
_FREE, _IN_USE, _ABSENT = b"\0", b"\1", b"\2"  # states of a block; unused parts count as free


class Run(NamedTuple):
    """Blocks ``start .. start + length - 1``."""

    start: int
    length: int


class _Group:
    """Active group of an owner: blocks ``next .. end - 1`` are its unused part."""

    __slots__ = ("end", "next")

    def __init__(self, next_block: int, end: int) -> None:
        self.next = next_block
        self.end = end


class BlockGroups:
    """Allocator of the KV blocks ``first .. first + blocks - 1``.

    Every block is in use, free, in the unused part of one active group, or withdrawn. An owner is
    the request pool row of a running request. The caller keeps track of which request holds which
    block in use. Unless a method says otherwise, costs are logarithmic in the number of free groups
    and independent of the number of blocks. Not thread-safe.

    Args:
        blocks: number of blocks at the start.
        page: tokens per block.
        first: number of the lowest block (the pool pads with block 0).
        capacity: largest number of blocks that can exist (see ``grow``); defaults to ``blocks``.
        expected_tokens: size of a new group where there is room, in tokens.
        near: number of lowest blocks that are preferred for new groups.

    Attributes:
        blocks: number of blocks that are not withdrawn.
        available: number of blocks that can be allocated: all that are neither in use nor
            withdrawn.
        expected: size of a new group where there is room, in blocks.
    """

    def __init__(
        self,
        blocks: int,
        *,
        page: int = 16,
        first: int = 1,
        capacity: int | None = None,
        expected_tokens: int = EXPECTED_TOKENS,
        near: int | None = None,
    ) -> None:
        capacity = blocks if capacity is None else capacity
        if not 0 <= blocks <= capacity:
            raise ValueError(
                f"the number of blocks, {blocks}, must not be negative or exceed the capacity of "
                f"{capacity}"
            )
        if page < 1 or first < 0 or expected_tokens < 1:
            raise ValueError(
                f"page ({page}) and expected_tokens ({expected_tokens}) must be positive, "
                f"first ({first}) not negative"
            )
        self.first = first
        self.capacity = capacity
        self.blocks = blocks
        self.expected = -(-expected_tokens // page)
        self._near = None if near is None else first + near
        self._end = first + blocks
        self._state = bytearray(first + capacity)
        self.clear()

    def clear(self) -> None:
        """Frees every block that is not withdrawn and forgets every owner. O(capacity)."""
        self._state = self._state.replace(_IN_USE, _FREE)
        self._free = FreeGroups()
        self._active: dict[int, _Group] = {}  # by owner
        self._unused_ends: dict[int, _Group] = {}  # end of an unused part -> its group
        # A heap of (-length, end) of unused parts. Growth shortens a part without updating the
        # heap, so an entry is an upper bound that is corrected when it reaches the top.
        self._longest_unused: list[tuple[int, int]] = []
        self.available = self.blocks
        start = self.first
        while start < self._end:
            if (end := self._state.find(_ABSENT, start, self._end)) < 0:
                end = self._end
            if start < end:
                self._free.add(start, end)
            start = end + 1

    def allocate(self, requests: Sequence[tuple[int | None, int]]) -> list[list[Run]] | None:
        """Allocates ``blocks`` blocks for each pair ``(owner, blocks)``.

        An owner grows in place while it can, and has an active group until ``close``. The owner
        None gets no unused part. The policy keeps the number of runs small.

        Returns:
            The runs of each request, in the order of its tokens; None, with nothing changed, if
            the requests do not all fit.

        Raises:
            ValueError: a number of blocks is negative; nothing has changed.
        """
        counts = [index(blocks) for _, blocks in requests]
        if counts and min(counts) < 0:
            raise ValueError(f"cannot allocate {min(counts)} blocks; ask for 0 or more")
        if sum(counts) > self.available:
            return None
        self.available -= sum(counts)
        return [
            self._hand_out(owner, blocks)
            for (owner, _), blocks in zip(requests, counts, strict=True)
        ]

    def append(self, owners: Sequence[int]) -> list[int] | None:
        """Allocates one block for each owner, as a decode step needs: a fast path of ``allocate``.

        Returns:
            The block of each owner; None, with nothing changed, if they do not all fit.
        """
        if len(owners) > self.available:
            return None
        self.available -= len(owners)
        active, state = self._active, self._state
        blocks = []
        for owner in owners:
            group = active.get(owner)
            if group is None or group.next == group.end:
                blocks.append(self._hand_out(owner, 1)[0].start)
                continue
            block = group.next
            group.next = block + 1
            if block + 1 == group.end:
                del self._unused_ends[group.end]
            state[block] = 1
            blocks.append(block)
        return blocks

    def release(self, runs: Iterable[tuple[int, int]]) -> None:
        """Releases the blocks of ``(start, length)`` runs.

        The runs may belong to any owners and need not be the runs that were allocated. Owners keep
        the unused parts of their active groups until ``close``.

        Raises:
            ValueError: a block is out of range, not in use, or named twice; nothing has changed.
        """
        spans = [(index(start), index(start) + index(length)) for start, length in runs]
        state = self._state
        for position, (start, end) in enumerate(spans):
            if not self.first <= start <= end <= self._end:
                problem = f"the pool has blocks {self.first} to {self._end - 1}"
            elif (unused := state.find(_FREE, start, end)) >= 0:
                problem = f"block {unused} is not in use; was it released twice?"
            elif (absent := state.find(_ABSENT, start, end)) >= 0:
                problem = f"block {absent} is withdrawn"
            else:
                state[start:end] = _FREE * (end - start)
                continue
            for undo_start, undo_end in spans[:position]:
                state[undo_start:undo_end] = _IN_USE * (undo_end - undo_start)
            raise ValueError(f"cannot release {end - start} blocks from {start}: {problem}")
        for start, end in spans:
            if start < end:
                self.available += end - start
                self._free.add(start, end)

    def close(self, owner: int) -> None:
        """Frees the unused part of an owner whose request has ended; its other blocks stay in use.

        Idempotent. The owner may be used again for another request.
        """
        group = self._active.pop(owner, None)
        if group is not None and group.next < group.end:
            del self._unused_ends[group.end]
            self._free.add(group.next, group.end)

    def grow(self, blocks: int) -> None:
        """Adds ``blocks`` free blocks after the last one. The cost is independent of ``blocks``.

        Raises:
            ValueError: the total would exceed ``capacity``, or ``blocks`` is negative; nothing has
                changed.
        """
        blocks = index(blocks)
        there = self._end - self.first
        if not 0 <= blocks <= self.capacity - there:
            raise ValueError(
                f"cannot grow by {blocks} blocks: the pool has {there} of at most {self.capacity}"
            )
        if blocks:
            self._free.add(self._end, self._end + blocks)
            self._end += blocks
            self.blocks += blocks
            self.available += blocks

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks`` blocks. The cost is independent of ``blocks``.

        Returns:
            False, with nothing changed, if one of them is in use or withdrawn: at most
            ``tail_free`` blocks can be removed.

        Raises:
            ValueError: ``blocks`` is negative; nothing has changed.
        """
        blocks = index(blocks)
        if blocks < 0:
            raise ValueError(f"cannot shrink by {blocks} blocks; ask for 0 or more")
        if blocks > self.tail_free:
            return False
        target = self._end - blocks
        while self._end > target:
            if (group := self._unused_ends.get(self._end)) is None:
                self._end = self._free.cut_tail(self._end, target)
            else:
                self._end = max(group.next, target)
                self._cut_back(group, self._end)
        self.blocks -= blocks
        self.available -= blocks
        return True

    def withdraw(self, start: int, end: int) -> int:
        """Removes the blocks in ``[start, end)`` that are not in use, until ``restore``.

        The cost grows with the number of free groups.

        Returns:
            Number of the blocks that are in use. The caller calls again after their release.

        Raises:
            ValueError: the range contains blocks that do not exist; nothing has changed.
        """
        self._check_range(start, end)
        if start == end:
            return 0
        for group in list(self._unused_ends.values()):
            if group.next < end and group.end > start:
                rest = group.end
                self._cut_back(group, max(group.next, min(start, rest)))
                self._free.add(group.end, rest)
        for run in self.free_runs():
            low, high = max(run.start, start), min(run.start + run.length, end)
            if low < high:
                self._free.take(run.start, run.length)
                if run.start < low:
                    self._free.add(run.start, low)
                if high < run.start + run.length:
                    self._free.add(high, run.start + run.length)
                self._state[low:high] = _ABSENT * (high - low)
                self.blocks -= high - low
                self.available -= high - low
        return self._state.count(_IN_USE, start, end)

    def restore(self, start: int, end: int) -> None:
        """Adds the withdrawn blocks in ``[start, end)`` as free blocks.

        Raises:
            ValueError: the range contains blocks that do not exist; nothing has changed.
        """
        self._check_range(start, end)
        while (low := self._state.find(_ABSENT, start, end)) >= 0:
            there = self._state[low:end].lstrip(_ABSENT)
            high = end - len(there)
            self._state[low:high] = _FREE * (high - low)
            self._free.add(low, high)
            self.blocks += high - low
            self.available += high - low
            start = high

    def _check_range(self, start: int, end: int) -> None:
        if not self.first <= index(start) <= index(end) <= self._end:
            raise ValueError(
                f"blocks {start} to {end - 1} do not exist: the pool has blocks {self.first} to "
                f"{self._end - 1}"
            )

    @property
    def tail_free(self) -> int:
        """Number of blocks that ``shrink`` can remove: all after the last used or withdrawn one."""
        end = self._end
        while True:
            if (start := self._free.start_of.get(end)) is not None:
                end = start
            elif (group := self._unused_ends.get(end)) is not None:
                end = group.next
            else:
                return self._end - end

    def unused(self, blocks: NDArray[np.int64]) -> int | None:
        """Returns the first of ``blocks`` that is not in use; None if all are in use."""
        in_use = np.frombuffer(self._state, np.uint8)[blocks] == _IN_USE[0]
        return None if in_use.all() else int(blocks[~in_use][0])

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self.blocks - self.available

    def free_runs(self) -> list[Run]:
        """Returns the free groups without unused parts, sorted by address."""
        return sorted(Run(start, length) for start, length in self._free.length_at.items())

    def unused_runs(self) -> dict[int, Run]:
        """Returns the unused part of the active group of each owner that has one."""
        return {
            owner: Run(group.next, group.end - group.next)
            for owner, group in self._active.items()
            if group.next < group.end
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if the data structures disagree. O(blocks)."""
        self._free.check_integrity()
        unused = self.unused_runs()
        ends = {group.end: group for group in self._active.values() if group.next < group.end}
        if ends != self._unused_ends:
            raise AssertionError(
                f"unused parts end at {set(ends)}, but the index has {set(self._unused_ends)}"
            )
        bounds: dict[int, int] = {}  # upper bound in the heap for the part with this end
        for length, end in self._longest_unused:
            bounds[end] = max(bounds.get(end, 0), -length)
        state = bytearray(self._state)
        for start, length in [*self.free_runs(), *unused.values()]:
            if start < self.first or start + length > self._end:
                raise AssertionError(f"run {start}+{length} exceeds the pool's range")
            if any(state[start : start + length]):
                raise AssertionError(f"run {start}+{length} is in use or listed twice")
            state[start : start + length] = b"\3" * length
        for owner, (start, length) in unused.items():
            if bounds.get(start + length, 0) < length:
                raise AssertionError(f"the heap lacks part {start}+{length} of owner {owner}")
        if (lost := state.find(_FREE, self.first, self._end)) >= 0:
            raise AssertionError(f"block {lost} is neither in use nor free nor in an unused part")
        if any(state[: self.first]) or any(state[self._end :]):
            raise AssertionError("a block outside the pool's range is in use")
        absent = state.count(_ABSENT)
        if self._end - absent != self.first + self.blocks or self.used != state.count(_IN_USE):
            raise AssertionError(
                f"{self.used} of {self.blocks} blocks should be in use, "
                f"{state.count(_IN_USE)} of {self._end - self.first - absent} are"
            )

    def _hand_out(self, owner: int | None, blocks: int) -> list[Run]:
        """Returns ``blocks`` blocks for one request; the caller has reduced ``available``."""
        runs: list[Run] = []
        group = None if owner is None else self._active.get(owner)
        while blocks:
            if group is None or group.next == group.end:
                start, end = self._place(group, blocks, owner is not None)
                if group is None:
                    group = _Group(start, end)
                    if owner is not None:
                        self._active[owner] = group
                group.next, group.end = start, end
                self._unused_ends[end] = group
            start = group.next
            group.next = end = min(start + blocks, group.end)
            self._state[start:end] = _IN_USE * (end - start)
            blocks -= end - start
            if end == group.end:
                del self._unused_ends[end]
            else:
                self._note_unused(group)
            if runs and runs[-1].start + runs[-1].length == start:
                runs[-1] = Run(runs[-1].start, runs[-1].length + end - start)
            else:
                runs.append(Run(start, end - start))
        return runs

    def _place(self, group: _Group | None, blocks: int, keep: bool) -> tuple[int, int]:
        """Returns the next group ``[start, end)`` of a request that needs ``blocks`` more blocks.

        The group has the expected size where there is room. All unused parts together should take
        at most half of the available blocks, so that the rest stays contiguous for other requests.
        """
        share = self.available // (2 * len(self._active) + 2)
        want = max(blocks, min(self.expected, share)) if keep else blocks
        if group is not None and (length := self._free.length_at.get(group.end)):
            return self._free.take(group.end, min(length, want))  # extend in place
        # Best fit keeps large groups for large requests. While many blocks are available, low
        # addresses matter more, because they keep the tail free.
        if self._near is not None and (near := self._free.below(self._near, want)) is not None:
            return self._free.take(near, min(self._free.length_at[near], want))
        candidates = _FITS if 4 * self.available >= self.blocks else 1
        if (fit := self._free.fit(want, candidates)) is not None:
            return self._free.take(fit, want)
        lender = self._lender()
        unused = lender.end - lender.next if lender is not None else 0
        largest = self._free.largest
        if lender is None or largest >= min(blocks, unused):
            return self._free.take(self._free.lowest(largest), largest)
        part = min(unused, max(blocks, unused // 2 if keep else 0))
        end = lender.end
        self._cut_back(lender, end - part)  # the lender keeps the front to grow into
        return end - part, end

    def _lender(self) -> _Group | None:
        """Returns the active group with the longest unused part; None if there is none."""
        heap = self._longest_unused
        while heap:
            length, end = heap[0]
            group = self._unused_ends.get(end)
            if group is None:
                heappop(heap)
            elif group.next - end != length:
                heapreplace(heap, (group.next - end, end))
            else:
                return group
        return None

    def _cut_back(self, group: _Group, end: int) -> None:
        del self._unused_ends[group.end]
        group.end = end
        if group.next < end:
            self._unused_ends[end] = group
            self._note_unused(group)

    def _note_unused(self, group: _Group) -> None:
        heap = self._longest_unused
        heappush(heap, (group.next - group.end, group.end))
        if len(heap) > 2 * len(self._unused_ends) + 64:
            heap[:] = [(each.next - end, end) for end, each in self._unused_ends.items()]
            heapify(heap)
