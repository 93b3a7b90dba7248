"""What the tiers need of SGLang beyond its external cache interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import hooks, runtime, weight_updates
from sgl_ext.engine.core.meta_info import tell
from sgl_ext.engine.core.unserved import Unserved, require_served
from sgl_ext.engine.restore import power as restore_setup
from sgl_ext.engine.restore import turn as restore_hooks
from sgl_ext.engine.swap import resume as swap_in

if TYPE_CHECKING:
    from sgl_ext.tiers.stack import TierStack

_IDLE_S = 0.001
"""Longest that an idle scheduler sleeps while requests wait for a lower tier."""

_LEAST_TOKENS = 64
"""A forward of fewer says little about what long prompts cost."""

LINKER = {"linker": "TierLinker", "linker_module_path": "sgl_ext.engine.tiers.linker"}


def declare(server_args: Any, config: ExtConfig) -> None:
    """Has SGLang make the tiers its external cache, before it resolves its arguments.

    Raises:
        ActivationError: the arguments ask for something that tiers do not serve.
    """
    if config.tiers is None:
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    if (config.tiers.ssd or config.tiers.remote) and (
        server_args.enable_lora or server_args.lora_paths
    ):
        # SGLang names an adapter after its path, and files may change under it.
        raise hooks.ActivationError(
            "the ssd and remote tiers do not work with LoRA adapters (--enable-lora, "
            "--lora-paths), whose KV would outlive them; use the host tier alone"
        )
    require_served(server_args, "tiers", _UNSERVED)
    declare_resolution(
        server_args,
        "sgl_ext",
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=LINKER,
    )


_UNSERVED: Unserved = (
    ("enable_unified_cache_external_linker", bool, "another external cache"),
    ("hicache_storage_backend", bool, "HiCache's storage"),
    ("enable_lmcache", bool, "LMCache"),
    ("enable_flexkv", bool, "FlexKV"),
)


def _stack() -> TierStack | None:
    return None if runtime.current is None else runtime.current.tiers


def _look_early(original: Callable[..., Any], scheduler: Any, req: Any, *args: Any) -> Any:
    """Pages begin to come from lower tiers when their request arrives, not when it is its turn."""
    if (stack := _stack()) is not None and stack.lower:
        req.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
    return original(scheduler, req, *args)


def held_back(adder: Any, req: Any) -> bool:
    """Whether pages of the request's prefix are still on their way."""
    if (stack := _stack()) is None or not stack.lower:
        return False
    return not _linker(adder).agreed(int(stack.ready(req.rid)))


def considered(adder: Any, req: Any, admitted: bool) -> None:
    """SGLang has tried to admit the request."""
    if (stack := _stack()) is None:
        return
    if restored := stack.take_restored(req.rid):
        tell(req, {"power": "tiers", "exact": True, "sources": restored})
    if admitted:
        stack.forget(req.rid)  # it is computed from here on, whether or not it loads anything
        _linker(adder).used_in_device(adder.tree_cache.tree_core, req.last_node)


def _linker(adder: Any) -> Any:
    return adder.tree_cache.linker.cache_linker


def _sleep_while_waiting(_result: None, _scheduler: Any) -> None:
    """Requests that are held back keep SGLang's loop awake; it leaves the core to their I/O."""
    if (stack := _stack()) is None:
        return
    if stack.pending() or restore_hooks.pending() or swap_in.pending():
        stack.wait(_IDLE_S)


def _measure(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    """Says what computing costs: what a tier must beat. A forward on the CPU ends with its call."""
    stack = _stack()
    if stack is None or not batch.forward_mode.is_extend():
        begin = time.monotonic()
        result = original(scheduler, batch, *args, **kw)
        if runtime.current is not None and (ahead := runtime.current.ahead) is not None:
            ahead.adaptive.iterated(time.monotonic() - begin)
        return result
    tokens = _computed(batch)  # plans may end with the forward
    first = restore_hooks.computes_from(batch, tokens)
    begin = time.monotonic()
    result = original(scheduler, batch, *args, **kw)
    seconds = time.monotonic() - begin
    stack.computing_seconds += seconds
    if tokens >= _LEAST_TOKENS:
        stack.computed(tokens, seconds)
        if first is not None:
            restore_hooks.computed(first, tokens, seconds)
    return result


def _computed(batch: Any) -> int:
    """Tokens of SGLang's ``ScheduleBatch`` that are not linked."""
    ext = runtime.current
    if ext is None or not ext.plans:
        return batch.extend_num_tokens or 0
    return sum(
        length if (plan := ext.plans.get(req.rid)) is None else plan.computed(start, start + length)
        for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    )


def _match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    wrapper.hit_markers.pop(req.rid, None)
    restore_hooks.looked_up(req)
    wrapper.cache_linker.asking = restore_hooks.prompt_of(req, result.device_prefix_len)
    return original(wrapper, key, req, result)


def _offloading(wrapper: Any, node: int, _transfers: Any) -> None:
    before = wrapper.cache.get_prefix_hash_values(node)
    wrapper.cache_linker.parent = bytes.fromhex(before[-1]) if before else None


def _forget(_wrapper: Any, rid: str) -> None:
    if (ext := runtime.current) is not None and ext.tiers is not None:
        ext.tiers.forget(rid)
        restore_hooks.release(ext, rid)
        if ext.swap is not None:
            ext.swap.drop(rid)
        if ext.ahead is not None:
            ext.ahead.cancel(rid)
        if ext.links is not None:
            ext.links.forget(rid)


def _weights_changed(_updater: Any, *_args: Any, **_kwargs: Any) -> None:
    """Pages are kept under the weights that the server was started with."""
    if (stack := _stack()) is not None:
        stack.disable("an update of the model's weights began; restart to use them again")
        restore_hooks.give_up()


def _report_live(result: Any, _scheduler: Any, _request: Any) -> Any:
    if (stack := _stack()) is not None:
        from sgl_ext.tiers.statistics import describe

        result.internal_state.setdefault("sgl_ext", {}).update(
            tiers=describe(stack), computing_seconds=stack.computing_seconds
        )
        if runtime.current is not None and (swap := runtime.current.swap) is not None:
            result.internal_state["sgl_ext"]["swap"] = swap.describe()
        if runtime.current is not None and (restorer := runtime.current.restorer) is not None:
            result.internal_state["sgl_ext"]["restore"] = restore_setup.describe(restorer, stack)
    return result


_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
HOOKS = (
    hooks.Hook(
        f"{_WRAPPER}._offload_node",
        "before",
        _offloading,
        "SGLang does not say what an offloaded node follows on, next to which it should lie",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        _report_live,
        "the live part of /server_info has a fixed set of contributors",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache",
        "around",
        _look_early,
        "an external cache is first asked when a request is admitted, not when it arrives",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.on_idle",
        "after",
        _sleep_while_waiting,
        "with a request in its queue SGLang's loop spins",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        "around",
        _measure,
        "SGLang counts prefill throughput for its log only",
    ),
    hooks.Hook(
        f"{_WRAPPER}.release_request",
        "before",
        _forget,
        "an external cache is told of aborted requests only if their load is queued",
    ),
    hooks.Hook(
        f"{_WRAPPER}.match",
        "around",
        _match,
        "what an earlier look-up of the request has found stays marked if this one finds nothing",
    ),
    *(
        hooks.Hook(
            f"{weight_updates.UPDATER}.{method}",
            "before",
            _weights_changed,
            "an external cache is not told that the weights change",
        )
        for method in weight_updates.METHODS
    ),
)
