"""Wants: requests' pages of KV that are beyond the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_ext.tiers.arena import Key

Name = Hashable
"""Name of a want: a request id, or a tuple of a purpose and a request id."""


class Run(NamedTuple):
    """Consecutive pages of a prefix, a chunk or another text."""

    keys: Sequence[Key]
    """Keys of the pages in tiers, in the order of the text."""
    start: int
    """Position in the prompt of the first token of the first page. It is before :attr:`least` if
    the run begins within the page."""
    here: int = 0
    """Number of leading pages that are in host memory."""
    least: int = 0
    """Position in the prompt of the first token of the run."""
    text: int = 0
    """Number of the text for whoever wants it."""


@dataclass(frozen=True)
class Want:
    """Pages that a request needs before, or while, its prompt is computed.

    The pages of a fresh prompt's prefix, of the chunks of a linked prompt and of a preempted
    request are wanted alike.
    """

    name: Name
    runs: tuple[Run, ...]
    """In the order of their positions in the prompt."""
    tokens: int = 0
    """Tokens of the prompt."""
    precedence: int = 0
    """A want with a smaller value goes first, before any policy."""
    linked: bool = False
    """Whether the pages are those of chunks, so that a plan links them."""


class Positions:
    """Positions in the prompt of the pages of a want, which are numbered from 0.

    Args:
        starts: position of the first token of each page, ascending; at least one.
        page: tokens of a page.
    """

    def __init__(self, starts: Sequence[int], page: int) -> None:
        self._starts = starts
        self.page = page

    def __len__(self) -> int:
        return len(self._starts)

    def start(self, number: int) -> int:
        """Returns the position at which a page starts, or the last page ends if there is none."""
        return self._starts[number] if number < len(self._starts) else self.end(number)

    def end(self, number: int) -> int:
        """Returns the position at which the page before page ``number`` ends."""
        return self._starts[number - 1] + self.page if number else self._starts[0]

    def before(self, position: int) -> int:
        """Returns the number of pages that start before a position."""
        return bisect_left(self._starts, position)

    def nearest(self, position: float) -> int:
        """Returns the number of the page whose start is nearest to a position."""
        return bisect_left(self._starts, position - self.page / 2)

    def tokens(self, first: int, last: int) -> range:
        """Returns the positions of consecutive pages ``first .. last - 1`` of one run."""
        return range(self.start(first), self.end(last)) if first < last else range(0)
