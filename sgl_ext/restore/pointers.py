"""The two pointers of one request: what is computed from the front, what is loaded from the back.

Everything is in pages of the prompt. Pure state; :mod:`sgl_ext.restore.restorer` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(slots=True)
class Stretch:
    """Consecutive pages that one tier has; its loads take them from the end on."""

    tier: str
    begin: int
    end: int
    """The I/O pointer: pages from here on are loaded, or about to be."""
    flying: int = 0
    """Pages from :attr:`end` on that are on their way."""
    began: float = 0.0
    """When they were asked for, on the monotonic clock."""


class Pointers:
    """Which pages of a prefix are computed, loaded, on their way, or nobody's yet (§3.1).

    A page is taken once: by computing, which goes forward from :attr:`front`, or by the load of
    its tier, which goes backward. What a load did not bring is computed after all.

    Args:
        front: the first page that is not there.
        stretches: consecutive, from ``front`` or behind it on.
    """

    def __init__(self, front: int, stretches: Sequence[Stretch]) -> None:
        if any(one.end != next_.begin for one, next_ in pairwise(stretches)):
            raise ValueError(f"gaps between {stretches}")
        if not stretches or stretches[0].begin < front:
            raise ValueError(f"nothing to load behind page {front}: {stretches}")
        self.front = front
        """The compute pointer: pages before it are computed, or about to be."""
        self.stretches = tuple(stretches)
        self.end = stretches[-1].end
        """Of the prefix."""
        self._landed = bytearray(self.end)

    def take(self, tier: str, most: int, now: float = 0.0) -> tuple[int, int] | None:
        """The next pages for a load of ``tier``: ``(begin, end)``; None if it has no more to do,
        or has not ended the last ones."""
        for stretch in self.stretches:
            if stretch.tier == tier:
                begin = max(stretch.begin, self.front, stretch.end - most)
                if stretch.flying or begin >= stretch.end:
                    return None
                stretch.flying = stretch.end - begin
                stretch.end, stretch.began = begin, now
                return begin, begin + stretch.flying
        return None

    def land(self, tier: str, good: Sequence[bool]) -> None:
        """What ``tier`` had on its way has ended; whether each page has come."""
        (stretch,) = (each for each in self.stretches if each.tier == tier)
        if len(good) != stretch.flying:
            raise ValueError(f"{len(good)} pages have landed, {stretch.flying} were on their way")
        for page, came in enumerate(good, stretch.end):
            self._landed[page] = bool(came) and page >= self.front
        stretch.flying = 0

    def compute(self, end: int) -> None:
        """Pages up to ``end`` that are not loaded are computed now, whoever brings them, too."""
        self.front = max(self.front, end)

    def left(self, tier: str) -> int:
        """Pages that neither computing nor ``tier``, which has them, has taken."""
        return sum(
            max(each.end - max(each.begin, self.front), 0)
            for each in self.stretches
            if each.tier == tier
        )

    @property
    def free(self) -> Iterator[Stretch]:
        """The stretches with pages that nobody has taken."""
        return (each for each in self.stretches if each.end > max(each.begin, self.front))

    @property
    def next_free(self) -> Stretch | None:
        """The first of them."""
        return next(self.free, None)

    @property
    def flying(self) -> Stretch | None:
        """The first stretch with pages on their way that computing has not taken."""
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
        """Whether nothing more will be loaded: all that is not there has to be computed."""
        return self.next_free is None and self.flying is None

    def came(self, page: int) -> bool:
        """Whether a load brought it before it was computed."""
        return bool(self._landed[page])

    def regions(self) -> Iterator[tuple[str, int, int]]:
        """The pages that each tier has, whoever has taken them: tier, first page, end."""
        ends = [*(each.begin for each in self.stretches[1:]), self.end]
        for each, end in zip(self.stretches, ends, strict=True):
            yield each.tier, each.begin, end

    def loaded(self) -> Iterator[tuple[int, int]]:
        """Runs of pages behind :attr:`front` that have landed."""
        end = self.front
        while (begin := self._landed.find(1, end)) >= 0:
            end = self._landed.find(0, begin)
            if end < 0:
                end = self.end
            yield begin, end
