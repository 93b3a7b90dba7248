"""Compute and I/O pointers of one request: computing goes up from the front, loading down.

All positions are pages of the prompt. The module holds state only;
:mod:`sgl_ext.planning.planner` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Stretch:
    """Consecutive pages that one tier has; its loads take them from the end backward."""

    tier: str
    begin: int
    end: int
    """I/O pointer: pages from here on are loaded or being loaded."""
    flying: int = 0
    """Pages from :attr:`end` on that are being loaded."""
    began: float = 0.0
    """Start of the current load on the monotonic clock, in seconds."""
    last: int = field(init=False)
    """End of the pages that the tier has."""

    def __post_init__(self) -> None:
        self.last = self.end


class Pointers:
    """State of the pages of a want: computed, loaded, in flight or free (CacheFlow §3.1).

    A page is taken once: by computing, which goes forward from :attr:`front`, or by a load of its
    tier, which goes backward. Pages that no tier has, or whose load fails, are computed.

    Args:
        front: first page that computing can take.
        stretches: stretches in order, the first of which begins at ``front`` or later.

    Raises:
        ValueError: there are no stretches, two overlap, or the first begins before ``front``.
    """

    def __init__(self, front: int, stretches: Sequence[Stretch]) -> None:
        if any(one.end > next_.begin for one, next_ in pairwise(stretches)):
            raise ValueError(f"the stretches overlap: {stretches}")
        if not stretches or stretches[0].begin < front:
            raise ValueError(f"expected pages to load from page {front} on, found {stretches}")
        self.front = front
        """Compute pointer: pages before it are computed, loaded or about to be computed."""
        self.stretches = tuple(stretches)
        self.end = stretches[-1].end
        """End of the pages."""
        self._landed = bytearray(self.end)

    def take(self, tier: str, most: int, now: float = 0.0) -> tuple[int, int] | None:
        """Takes the next pages for a load of ``tier``, from its last stretch that has any left.

        Args:
            most: maximum number of pages.
            now: time on the monotonic clock, in seconds.

        Returns:
            ``(begin, end)``; None if the tier has no pages left or its last load has not ended.
        """
        if self.load(tier) is not None:
            return None
        for stretch in reversed(self.stretches):
            begin = max(stretch.begin, self.front, stretch.end - most)
            if stretch.tier == tier and begin < stretch.end:
                stretch.flying = stretch.end - begin
                stretch.end, stretch.began = begin, now
                return begin, begin + stretch.flying
        return None

    def load(self, tier: str) -> Stretch | None:
        """Returns the stretch of which ``tier`` loads pages; None if it loads none."""
        return next((each for each in self.stretches if each.flying and each.tier == tier), None)

    def land(self, tier: str, good: Sequence[bool]) -> int:
        """Records the end of the load of ``tier``.

        Args:
            good: True for each page that has landed.

        Returns:
            The number of landed pages that computing has not passed meanwhile.

        Raises:
            ValueError: the load was of another number of pages.
        """
        stretch = self.load(tier)
        if stretch is None or len(good) != stretch.flying:
            raise ValueError(f"{tier} reported the results of {len(good)} pages, loads {stretch}")
        first, stretch.flying = stretch.end, 0
        for page, came in enumerate(good, first):
            self._landed[page] = bool(came) and page >= self.front
        return sum(self._landed[page] for page in range(first, first + len(good)))

    def compute(self, end: int) -> None:
        """Moves the compute pointer to ``end``; computing takes the pages before it that are not
        loaded, even if a load of them is in flight."""
        self.front = max(self.front, end)

    def limit(self, end: int) -> None:
        """Leaves the pages from ``end`` on to nobody, but for stretches that are being loaded."""
        for each in self.stretches:
            if not each.flying:
                each.end = max(min(each.end, end), each.begin)

    def left(self, tier: str) -> int:
        """Returns the number of pages of ``tier`` that neither computing nor loading has taken."""
        return sum(
            max(each.end - max(each.begin, self.front), 0)
            for each in self.stretches
            if each.tier == tier
        )

    @property
    def free(self) -> Iterator[Stretch]:
        """Stretches with pages that neither computing nor loading has taken."""
        return (each for each in self.stretches if each.end > max(each.begin, self.front))

    @property
    def next_free(self) -> Stretch | None:
        """First of the :attr:`free` stretches; None if there is none."""
        return next(self.free, None)

    @property
    def flying(self) -> Stretch | None:
        """First stretch with pages in flight that computing has not taken; None without one."""
        return next(
            (
                each
                for each in self.stretches
                if each.flying and each.end + each.flying > self.front
            ),
            None,
        )

    @property
    def settled(self) -> bool:
        """Returns whether nothing more will be loaded, so that missing pages must be computed."""
        return self.next_free is None and self.flying is None

    def landed(self, end: int) -> int:
        """Returns the number of loaded pages from :attr:`front` to page ``end``."""
        return self._landed.count(1, self.front, end)

    def came(self, page: int) -> bool:
        """Returns whether the page was loaded before it was computed."""
        return bool(self._landed[page])

    def regions(self) -> Iterator[tuple[str, int, int]]:
        """Yields ``(tier, first page, end)`` of the pages that each tier has, taken or not."""
        for each in self.stretches:
            yield each.tier, each.begin, each.last

    def loaded(self) -> Iterator[tuple[int, int]]:
        """Yields runs ``(begin, end)`` of landed pages from :attr:`front` on."""
        end = self.front
        while (begin := self._landed.find(1, end)) >= 0:
            end = self._landed.find(0, begin)
            if end < 0:
                end = self.end
            yield begin, end
