"""Activates the extension in SGLang's scheduler process."""

from __future__ import annotations

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import dispatch, hooks, meta_info, runtime
from sgl_ext.engine.core.powers import ORDER
from sgl_ext.engine.front import validation
from sgl_ext.engine.kv import install, ownership
from sgl_ext.engine.step import (
    admission,
    beams,
    budget,
    cached_tokens,
    forward,
    logprobs,
    penalties,
    stop_patterns,
)

HOOKS = (
    *dispatch.HOOKS,
    *validation.HOOKS,
    *install.HOOKS,
    *ownership.HOOKS,
    *meta_info.HOOKS,
    *admission.HOOKS,
    *beams.HOOKS,
    *budget.HOOKS,
    *cached_tokens.HOOKS,
    *forward.HOOKS,
    *logprobs.HOOKS,
    *penalties.HOOKS,
    *stop_patterns.HOOKS,
    *(hook for kind in ORDER for hook in kind.hooks),
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
