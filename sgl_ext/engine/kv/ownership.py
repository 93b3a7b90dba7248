"""Ownership checks: every KV block belongs to the radix tree, one request, or the free list.

If a block has two owners, one overwrites it while the other reads it, which gives wrong tokens.
Each check runs before the state that it covers is computed with, so that a scheduler that finds
such a block ends before it answers. SGLang's own checks run when the server is idle, or with
``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY`` after the answers of a step were sent.
"""

from __future__ import annotations

from typing import Any

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.sglang_types import (
    Allocator,
    PrefillAdder,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
)


class TwoOwnersError(RuntimeError):
    """Error raised when a KV block has two owners. The scheduler must end: its KV may be wrong."""


def check_admitted(adder: PrefillAdder, req: Req) -> None:
    """Checks that the tree owns the prefix that it lends to a request.

    The check leaves out tokens that an external cache loads into slots of the request's own.

    Raises:
        TwoOwnersError: the tree does not own the prefix.
    """
    if req.session is not None or req.beam_group is not None:
        return  # such requests take over KV records of others
    linker, loaded = getattr(adder.tree_cache, "linker", None), 0
    if linker is not None and (slots := linker.private_load_indices.get(req.rid)) is not None:
        loaded = len(slots)
    _check_prefix(req, loaded)


def check_resumed(req: Req) -> None:
    """Checks that the tree owns all of the prefix of a request that is resumed.

    Raises:
        TwoOwnersError: the tree does not own the prefix.
    """
    _check_prefix(req, 0)


def _check_prefix(req: Req, loaded: int) -> None:
    if req.kv.cache_protected_len != req.prefix_len - loaded:
        raise TwoOwnersError(
            f"request {req.rid} has a prefix of {req.prefix_len} tokens, {loaded} of them in its "
            f"own slots, but counts {req.kv.cache_protected_len} as owned by the radix tree; "
            "please report this"
        )


def _inserted(result: Any, tree: RadixTree, *_args: object, **_kw: object) -> object:
    """Checks that the tree keeps none of the slots that an insert frees as duplicates."""
    allocator = tree.token_to_kv_pool_allocator
    unused = getattr(allocator, "unused", None)
    if unused is None or result.last_device_node is None or not _affordable(allocator):
        return result
    if (freed := unused(tree.path_device_indices(result.last_device_node))) is not None:
        raise TwoOwnersError(
            f"block {freed} was freed, but the radix tree still owns it; please report this"
        )
    return result


def _affordable(allocator: Allocator) -> bool:
    """Returns whether the slots of a prefix may be compared: on a GPU they are first waited for."""
    from sglang.srt.environ import envs

    strict = envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get()
    return allocator.device == "cpu" or bool(strict)


def check_step(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    """Checks that all owners together hold no more tokens than the pool has.

    The cost is O(running requests).

    Raises:
        TwoOwnersError: they hold more.
    """
    if runtime.current is None or runtime.current.slab is None:
        return
    owned = owned_tokens(scheduler, batch)
    if owned > scheduler.max_total_num_tokens:
        raise TwoOwnersError(
            f"{owned} tokens of KV are free, cached or held by requests, but the pool has "
            f"{scheduler.max_total_num_tokens}, so some blocks have two owners; please report this"
        )


def owned_tokens(scheduler: Scheduler, batch: ScheduleBatch) -> int:
    """Returns the number of tokens that are free, cached, or held by requests or sessions.

    The requests include those of ``batch``. A token counts as often as it has owners.
    """
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    page = allocator.page_size
    rows = {
        id(req): req for req in (*scheduler.invariant_checker._requests_owning_rows(), *batch.reqs)
    }
    records = {id(kv) for kv in tree.session_records().values()}
    private = 0
    for req in rows.values():
        kv = req.kv
        if kv.holds_kv and id(kv) not in records:
            private += -(-kv.kv_allocated_len // page) * page - kv.cache_protected_len
            if req.beam_group is not None:
                private += req.beam_group.extra_uncached_tokens()
    held = scheduler.pool_stats_observer.session_held_tokens()
    cached = tree.evictable_size() + tree.protected_size()
    return int(allocator.available_size() + cached + held + private)


HOOKS = (
    hooks.Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
        "after",
        _inserted,
        "SGLang assumes that a request owns all KV after its protected prefix",
    ),
)
