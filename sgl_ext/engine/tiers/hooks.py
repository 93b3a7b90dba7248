"""Hooks of the ``tiers`` power, where SGLang's interface of external caches does not suffice."""

from __future__ import annotations

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.releases import linker_hooks
from sgl_ext.engine.core.sglang_types import LinkerWrapper, Node, Req, Scheduler
from sgl_ext.engine.tiers.once import used_once

LINKER = {"linker": "TierLinker", "linker_module_path": "sgl_ext.engine.tiers.linker"}
"""Class that SGLang creates as its external cache."""

_IDLE_S = 0.001
"""Longest sleep of an idle scheduler while I/O is in progress, in seconds."""


def _look_early(original: Original, scheduler: Scheduler, req: Req, *args: object) -> object:
    """Starts to load pages from lower tiers when their request arrives, not at its admission."""
    ext = runtime.current
    # The admission of an idle scheduler follows at once, and looks the request up itself.
    idle = (
        not scheduler.waiting_queue
        and scheduler.running_batch.is_empty()
        and scheduler.chunked_req is None
    )
    if ext is not None and ext.tiers is not None and ext.tiers.stack.lower and not idle:
        with ext.tiers.linker.prefixes.early():
            req.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
    return original(scheduler, req, *args)


def _sleep_while_waiting(_result: None, _scheduler: Scheduler) -> None:
    """Lets an idle scheduler sleep, so that the core serves the I/O that requests wait for."""
    ext = runtime.current
    if ext is None or ext.tiers is None:
        return
    if ext.pending():
        ext.tiers.stack.wait(_IDLE_S)


def _stay_awake(original: Original, scheduler: Scheduler) -> None:
    """Lets an idle scheduler process the end of copies to host memory, and begin what follows.

    The next request would otherwise wait for this.
    """
    ext = runtime.current
    stack = None if ext is None or ext.tiers is None else ext.tiers.stack
    if stack is None or scheduler.idle_sleeper is None or not stack.stores.in_progress:
        original(scheduler)
    else:
        stack.wait(_IDLE_S)


def _offloading(wrapper: LinkerWrapper, node: Node, _transfers: object) -> None:
    linker, tree = wrapper.cache_linker, wrapper.cache
    linker.before = [*map(bytes.fromhex, tree.get_prefix_hash_values(node))]
    linker.used_once = used_once(tree.tree_core, node)


HOOKS = (
    hooks.Hook(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker."
        "UnifiedCacheLinkerWrapper._offload_node",
        "before",
        _offloading,
        "SGLang does not report the pages before an offloaded node, next to which its own should "
        "be placed, and not whether they are under a key that is never looked up again",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache",
        "around",
        _look_early,
        "an external cache is first queried when a request is admitted, not when it arrives",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.on_idle",
        "after",
        _sleep_while_waiting,
        "SGLang's loop spins while a request is in its queue",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
        "around",
        _stay_awake,
        "SGLang's loop sleeps until the next request, which then waits for the end of stores",
    ),
    *linker_hooks(LINKER),
)
