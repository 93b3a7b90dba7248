"""Takes blocks from the slab's tail and gives them back, with SGLang's accounting kept true.

SGLang copies its pool's size into several objects when it starts, and compares the free, cached
and used slots with it after every step. All copies change here, together with the allocator, in
one call on the scheduler's thread between two steps.
"""

from __future__ import annotations

from typing import Any

from sgl_ext.engine.kv_allocator import BlockGroupAllocator
from sgl_ext.errors import ExtError

_HOLDERS = ("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher")
"""Parts of the scheduler that have their own ``max_total_num_tokens``."""


def shrink(scheduler: Any, blocks: int) -> None:
    """Removes the last ``blocks`` blocks from SGLang's view. O(1) in the size of the pool.

    Raises:
        ExtError: a block of them is in use, or SGLang does not run on the slab; nothing changed.
    """
    allocator = _allocator(scheduler)
    groups = allocator.groups
    if blocks >= groups.blocks:
        raise ExtError(f"cannot give away {blocks} of {groups.blocks} blocks; leave at least one")
    if not groups.shrink(blocks):
        raise ExtError(
            f"cannot give away {blocks} blocks: only the last {groups.tail_free} of "
            f"{groups.blocks} are free; ask for fewer, or evict first"
        )
    _account(scheduler, allocator)


def grow(scheduler: Any, blocks: int) -> None:
    """Adds ``blocks`` blocks that were taken before. O(1) in the size of the pool.

    Raises:
        ExtError: the slab has no more blocks, or SGLang does not run on it; nothing changed.
    """
    allocator = _allocator(scheduler)
    try:
        allocator.groups.grow(blocks)
    except ValueError as error:
        raise ExtError(str(error)) from None
    _account(scheduler, allocator)


def _allocator(scheduler: Any) -> BlockGroupAllocator:
    allocator = scheduler.token_to_kv_pool_allocator
    if not isinstance(allocator, BlockGroupAllocator):
        raise ExtError(
            f"SGLang runs on {type(allocator).__name__}, which cannot change its size; "
            "start with the block-major layout"
        )
    return allocator


def _account(scheduler: Any, allocator: BlockGroupAllocator) -> None:
    allocator.num_pages = allocator.groups.blocks
    allocator.size = tokens = allocator.num_pages * allocator.page_size
    scheduler.max_total_num_tokens = tokens
    for name in _HOLDERS:
        # Some of them are frozen, for SGLang's pools never change their size while serving.
        object.__setattr__(getattr(scheduler, name), "max_total_num_tokens", tokens)
