"""What the extension does in SGLang's scheduler process."""

from __future__ import annotations

from typing import Any

from sgl_ext.config import ExtConfig
from sgl_ext.engine.chunks import power as chunk_hooks
from sgl_ext.engine.clusters import power as stored_hooks
from sgl_ext.engine.core import hooks, meta_info, runtime
from sgl_ext.engine.core.activation import report
from sgl_ext.engine.front import validation as request_hooks
from sgl_ext.engine.kv import install as kv_memory
from sgl_ext.engine.kv import ownership
from sgl_ext.engine.peer import power as peer_hooks
from sgl_ext.engine.restore import interruption
from sgl_ext.engine.step import admission, beams, cached_tokens, stop_patterns
from sgl_ext.engine.step import forward as plan_hooks
from sgl_ext.engine.swap import api as priority_api
from sgl_ext.engine.swap import logprobs as skipped_logprobs
from sgl_ext.engine.swap import out as swap_hooks
from sgl_ext.engine.swap import penalties, priorities
from sgl_ext.engine.tiers import power as tier_hooks

REPORT_KEY = "sgl_ext"
"""Key of our report in the scheduler's ready message, and so in ``/server_info``."""


def _add_report(result: dict[str, Any], _scheduler: Any) -> dict[str, Any]:
    if (ext := runtime.current) is not None:
        result[REPORT_KEY] = {**report(ext.config), "memory": ext.describe_memory()}
    return result


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "after",
        _add_report,
        "the ready message has a fixed set of keys; it is the launcher's only word from a "
        "scheduler before serving, and SGLang shows it in /server_info",
    ),
    *request_hooks.HOOKS,
    *kv_memory.HOOKS,
    *ownership.HOOKS,
    *meta_info.HOOKS,
    *admission.HOOKS,
    *beams.HOOKS,
    *interruption.HOOKS,
    *tier_hooks.HOOKS,
    *cached_tokens.HOOKS,
    *plan_hooks.HOOKS,
    *chunk_hooks.HOOKS,
    *swap_hooks.HOOKS,
    *penalties.HOOKS,
    *skipped_logprobs.HOOKS,
    *stop_patterns.HOOKS,
    *priorities.HOOKS,
    *priority_api.HOOKS,
    *peer_hooks.HOOKS,
    *stored_hooks.HOOKS,
)


def activate(config: ExtConfig) -> None:
    """Activates this scheduler process. Raises ActivationError; repeating it changes nothing."""
    if runtime.current is None or runtime.current.config != config:
        runtime.current = runtime.ExtRuntime(config)
    # A progress bar's default lock is a named semaphore, which outlives a killed scheduler.
    import threading

    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    # SGLang applies all plugins' hooks at once; ours come early, and must not shut out the rest.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    hooks.apply(HOOKS)
