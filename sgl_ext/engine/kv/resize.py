"""Changes how many blocks there are while SGLang serves, with its accounting kept true.

SGLang copies its pool's size into several objects when it starts, and compares the free, cached
and used slots with it after every step. All copies change here, together with the allocator, in
one call on the scheduler's thread between two steps.
"""

from __future__ import annotations

from sgl_ext.engine.core.sglang_types import Scheduler
from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.errors import ExtError

HOLDERS = ("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher")
"""Parts of the scheduler that have their own ``max_total_num_tokens``."""
_INPUT_MARGIN = 5
"""By how many tokens SGLang keeps an input below the longest request."""


class KVResizer:
    """A scheduler's blocks.

    Every call is O(1) in the size of the pool, but for the free blocks of a range.

    Raises:
        ExtError: SGLang does not run on the slab, or lacks one of the counts.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        allocator = scheduler.token_to_kv_pool_allocator
        if not isinstance(allocator, BlockGroupAllocator):
            raise ExtError(
                f"SGLang runs on {type(allocator).__name__}, which cannot change its size; "
                "start with the block-major layout"
            )
        self._scheduler = scheduler
        self._allocator = allocator
        self._holders = [getattr(scheduler, name, None) for name in HOLDERS]
        for name, holder in zip(HOLDERS, self._holders, strict=True):
            if not hasattr(holder, "max_total_num_tokens"):
                raise ExtError(f"this SGLang's scheduler has no size in {name}; it cannot follow")
        self._longest_request: int = scheduler.model_config.context_len - 1

    @property
    def blocks(self) -> int:
        """Blocks that SGLang has."""
        return self._allocator.groups.blocks

    @property
    def tail_free(self) -> int:
        """Blocks behind the last one in use."""
        return self._allocator.groups.tail_free

    @property
    def least(self) -> int:
        """Blocks without which no request would fit."""
        return -(-(_INPUT_MARGIN + 2) // self._allocator.page_size)

    @property
    def removable(self) -> int:
        """Blocks that :meth:`shrink` can remove if none is in use: none while one may be copied."""
        if self._allocator.copying:
            return 0
        return max(self.blocks - self.least, 0)

    def promise(self, blocks: int) -> None:
        """Requests that need so many are accepted, though they may have to wait for some."""
        if (tokens := blocks * self._allocator.page_size) != self._allocator.promised:
            self._allocator.promised = tokens
            self._account()

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks`` blocks.

        Returns:
            False, with nothing changed, if one is in use or still copied, or no request would fit
            any more.

        Raises:
            ValueError: fewer than none.
        """
        if blocks > self.removable or not self._allocator.shrink(blocks):
            return False
        self._account()
        return True

    def grow(self, blocks: int) -> None:
        """Adds ``blocks`` blocks that were taken before.

        Raises:
            ValueError: the slab has no more, or fewer than none; nothing has changed.
        """
        self._allocator.groups.grow(blocks)
        self._account()

    def restore(self, start: int, end: int) -> None:
        """Blocks ``[start, end)`` have memory."""
        self._allocator.groups.restore(start, end)
        self._account()

    def withdraw(self, start: int, end: int) -> int:
        """Takes those of blocks ``[start, end)`` that are not in use; returns how many are.

        What is taken is read and written by nobody any more.
        """
        in_use = self._allocator.withdraw(start, end)
        self._account()
        return in_use

    def _account(self) -> None:
        allocator, scheduler = self._allocator, self._scheduler
        allocator.num_pages = self.blocks
        allocator.size = tokens = self.blocks * allocator.page_size
        scheduler.max_total_num_tokens = tokens
        reachable = max(tokens, allocator.promised)
        scheduler.max_req_len = min(self._longest_request, reachable - 1)
        scheduler.max_req_input_len = scheduler.max_req_len - _INPUT_MARGIN
        for holder in self._holders:
            # Some are frozen, for SGLang's pools never change their size while serving.
            object.__setattr__(holder, "max_total_num_tokens", tokens)
