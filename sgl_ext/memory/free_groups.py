"""Free groups: maximal runs of free blocks, found by length, by address and by either end."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush


class FreeGroups:
    """A set of disjoint runs ``[start, end)``, in which adjacent runs are merged.

    Costs are logarithmic in the number of runs and independent of their lengths.
    """

    def __init__(self) -> None:
        self.length_at: dict[int, int] = {}
        """Length of each run, by its start"""
        self.start_of: dict[int, int] = {}
        """Start of each run, by its end"""
        # At most sqrt(2 * blocks) lengths can differ, as their sum is at most the pool.
        self._lengths: list[int] = []  # lengths that occur, sorted
        self._counts: dict[int, int] = {}  # length -> number of runs
        # Length -> heap of starts. The start of a run that was removed or changed stays in the heap
        # until it reaches the top, or until such entries are the majority.
        self._starts: dict[int, list[int]] = {}

    @property
    def largest(self) -> int:
        """Length of the longest run; 0 if there are no runs."""
        return self._lengths[-1] if self._lengths else 0

    def add(self, start: int, end: int) -> None:
        """Adds the blocks ``[start, end)``, none of which may be in the set."""
        if (before := self.start_of.get(start)) is not None:
            self._remove(before)
            start = before
        if (behind := self.length_at.get(end)) is not None:
            self._remove(end)
            end += behind
        length = end - start
        self.length_at[start] = length
        self.start_of[end] = start
        if length not in self._counts:
            insort(self._lengths, length)
            self._counts[length] = 1
            self._starts[length] = [start]
            return
        self._counts[length] += 1
        starts = self._starts[length]
        heappush(starts, start)
        if len(starts) > 2 * self._counts[length] + 64:
            starts[:] = {each for each in starts if self.length_at.get(each) == length}
            heapify(starts)

    def take(self, start: int, blocks: int) -> tuple[int, int]:
        """Removes the first ``blocks`` blocks of the run at ``start``; returns ``(start, end)``."""
        end = start + self._remove(start)
        if start + blocks < end:
            self.add(start + blocks, end)
        return start, start + blocks

    def cut_tail(self, end: int, to: int) -> int:
        """Removes the blocks from ``to`` on from the run that ends at ``end``.

        Returns:
            Start of the removed blocks.
        """
        start = self.start_of[end]
        self._remove(start)
        if start < to:
            self.add(start, to)
        return max(start, to)

    def fit(self, blocks: int, candidates: int) -> int | None:
        """Returns the lowest start among the best-fitting runs; None if no run is long enough.

        The best-fitting runs have the smallest lengths of at least ``blocks``.

        Args:
            candidates: number of lengths to consider; 1 is best fit.
        """
        first = bisect_left(self._lengths, blocks)
        fitting = self._lengths[first : first + candidates]
        return min(map(self.lowest, fitting), default=None)

    def below(self, limit: int, blocks: int) -> int | None:
        """Returns the start of a run that begins below ``limit``; None if there is none.

        Prefers the shortest run of at least ``blocks`` blocks, then the longest of the others.
        """
        first = bisect_left(self._lengths, blocks)
        for length in (*self._lengths[first:], *reversed(self._lengths[:first])):
            if (start := self.lowest(length)) < limit:
                return start
        return None

    def lowest(self, length: int) -> int:
        """Returns the start of the lowest run of exactly ``length`` blocks, which must exist."""
        starts = self._starts[length]
        while self.length_at.get(starts[0]) != length:
            heappop(starts)
        return starts[0]

    def check_integrity(self) -> None:
        """Raises AssertionError if the indexes disagree or two runs touch."""
        ends = {start + length: start for start, length in self.length_at.items()}
        if ends != self.start_of:
            raise AssertionError(f"free runs end at {ends}, but the index has {self.start_of}")
        if touching := ends.keys() & self.length_at.keys():
            raise AssertionError(f"free runs touch, unmerged, at {sorted(touching)}")
        counts: dict[int, int] = {}
        for start, length in self.length_at.items():
            counts[length] = counts.get(length, 0) + 1
            if start not in self._starts.get(length, ()):
                raise AssertionError(f"free run {start}+{length} is not indexed by its length")
        if counts != self._counts or sorted(counts) != self._lengths:
            raise AssertionError(
                f"free runs have lengths {counts}, but the indexes have {self._counts}, "
                f"{self._lengths}"
            )
        if self._starts.keys() != counts.keys():
            raise AssertionError(f"starts are kept for lengths {set(self._starts) - set(counts)}")
        for length, starts in self._starts.items():
            if any(starts[i] < starts[(i - 1) // 2] for i in range(1, len(starts))):
                raise AssertionError(f"starts of length {length} are not a heap: {starts}")

    def _remove(self, start: int) -> int:
        length = self.length_at.pop(start)
        del self.start_of[start + length]
        self._counts[length] -= 1
        if not self._counts[length]:
            del self._counts[length], self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length
