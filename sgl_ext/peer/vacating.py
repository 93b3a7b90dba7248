"""Policy of vacating KV memory: what is evicted, what is retracted, and when to try again.

Sizes are in tokens, times in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

RETRY_S = 0.1
"""Time after which a range is vacated again although its holders have not changed"""

Leaf = TypeVar("Leaf")
Node = TypeVar("Node")


def leaves_to_evict(
    paths: Mapping[Leaf, Sequence[Node]], within: Callable[[Node], bool]
) -> list[Leaf]:
    """Returns the leaves of the prefix tree behind which memory of the range is held.

    A node can be evicted only after all nodes behind it. The nodes that become leaves then are
    found by another call.

    Args:
        paths: nodes between the root and each leaf that can be evicted, the leaf included.
        within: whether a node holds memory of the range.
    """
    return [leaf for leaf, path in paths.items() if any(map(within, path))]


def fits(longest: int, size: int, page: int) -> bool:
    """Returns whether SGLang admits a request that runs alone.

    Args:
        longest: tokens of the request, those that SGLang reserves for its output included.
        size: tokens of the pool.
        page: tokens per page.
    """
    # SGLang charges one extra page per request, for a last page that is not full.
    return longest + page < size


def chunk_fits(rest: int, chunk: int | None, available: int, page: int) -> bool:
    """Returns whether there is memory for the next chunk of a chunked prompt.

    Args:
        rest: tokens of the prompt that have no KV yet.
        chunk: largest number of tokens per chunk; None for no limit.
        available: tokens that are free or can be evicted.
        page: tokens per page.
    """
    return min(rest, chunk or rest) + page <= available


class Attempts:
    """Attempts to vacate ranges whose holders may not leave at once.

    An attempt is repeated when the holders have changed, or after :data:`RETRY_S`.
    """

    def __init__(self) -> None:
        # Time of the last attempt at each range, and the holders after it.
        self._last: dict[tuple[int, int], tuple[float, object]] = {}

    def due(self, start: int, end: int, holders: object, now: float) -> bool:
        """Returns whether to vacate blocks ``[start, end)``.

        Args:
            holders: value that changes when a request ends or cached blocks become evictable.
        """
        self._last = {at: last for at, last in self._last.items() if now - last[0] < RETRY_S}
        last = self._last.get((start, end))
        return last is None or last[1] != holders

    def record(self, start: int, end: int, holders: object, now: float) -> None:
        """Records an attempt at blocks ``[start, end)``, after which ``holders`` remain."""
        self._last[start, end] = now, holders
