"""Changes of the number of blocks while SGLang serves, together with SGLang's accounting.

SGLang copies its pool's size into several objects when it starts, and its checks compare the free,
cached and used slots with it. All copies change here, together with the allocator, in one call on
the scheduler's thread between two steps.
"""

from __future__ import annotations

from sgl_ext.engine.core.sglang_types import Scheduler
from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.errors import ExtError
from sgl_ext.memory.streams import Streams

HOLDERS = ("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher")
"""Parts of the scheduler that have their own ``max_total_num_tokens``."""
_INPUT_MARGIN = 5
"""Tokens by which SGLang keeps an input shorter than the longest request."""


class KVResizer:
    """Resizing of a scheduler's blocks.

    The cost of a call does not depend on the size of the pool. That of :meth:`restore` and
    :meth:`withdraw` grows with the range and with the number of free groups.

    SGLang frees slots while a forward that was launched may still use them. Blocks that are removed
    go to other processes, which no stream orders: the host waits for the device first.

    Args:
        streams: streams whose work may use the blocks.

    Raises:
        ExtError: SGLang does not run on the slab, or lacks one of the counts.
    """

    def __init__(self, scheduler: Scheduler, streams: Streams | None = None) -> None:
        allocator = scheduler.token_to_kv_pool_allocator
        if not isinstance(allocator, BlockGroupAllocator):
            raise ExtError(
                f"SGLang uses the allocator {type(allocator).__name__}, which cannot be resized; "
                "start with the block-major KV layout"
            )
        self._scheduler = scheduler
        self._allocator = allocator
        self._streams = streams or Streams()
        self._holders = [getattr(scheduler, name, None) for name in HOLDERS]
        for name, holder in zip(HOLDERS, self._holders, strict=True):
            if not hasattr(holder, "max_total_num_tokens"):
                raise ExtError(
                    f"SGLang's scheduler has no max_total_num_tokens in {name}, so it cannot "
                    "follow a resized pool; install the supported SGLang"
                )
        self._longest_request: int = scheduler.model_config.context_len - 1

    @property
    def blocks(self) -> int:
        """Number of blocks that SGLang has."""
        return self._allocator.groups.blocks

    @property
    def tail_free(self) -> int:
        """Number of blocks behind the last one in use; waits for slots that were just freed."""
        self._allocator.settle()
        return self._allocator.groups.tail_free

    @property
    def least(self) -> int:
        """Minimum number of blocks with which a request fits."""
        return -(-(_INPUT_MARGIN + 2) // self._allocator.page_size)

    @property
    def removable(self) -> int:
        """Number of blocks that :meth:`shrink` can remove if none is in use; 0 during a copy."""
        if self._allocator.copying:
            return 0
        return max(self.blocks - self.least, 0)

    def promise(self, blocks: int) -> None:
        """Has SGLang accept requests that need up to ``blocks`` blocks.

        Such a request may have to wait for some of them.
        """
        if (tokens := blocks * self._allocator.page_size) != self._allocator.promised:
            self._allocator.promised = tokens
            self._account()

    def shrink(self, blocks: int) -> bool:
        """Removes the last ``blocks`` blocks, and waits until no forward uses them.

        Returns:
            False, with nothing changed, if a block is in use, a copy is in progress, or no request
            would fit any more.

        Raises:
            ValueError: ``blocks`` is negative.
        """
        if blocks > self.removable or not self._allocator.shrink(blocks):
            return False
        self._streams.synchronize()
        self._account()
        return True

    def grow(self, blocks: int) -> None:
        """Adds ``blocks`` blocks that were removed before.

        Raises:
            ValueError: the slab has no more blocks, or ``blocks`` is negative; nothing has changed.
        """
        self._allocator.groups.grow(blocks)
        self._account()

    def restore(self, start: int, end: int) -> None:
        """Adds the withdrawn blocks of ``[start, end)``, which have memory again."""
        self._allocator.groups.restore(start, end)
        self._account()

    def withdraw(self, start: int, end: int) -> int:
        """Removes the blocks of ``[start, end)`` that are not in use.

        Returns the number of blocks that are in use. No copy reads or writes the removed blocks any
        more, and if none is in use, no forward either.
        """
        in_use = self._allocator.withdraw(start, end)
        if not in_use:
            self._streams.synchronize()
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
            # Some are frozen, because SGLang's own pools never change their size while serving.
            object.__setattr__(holder, "max_total_num_tokens", tokens)
