"""Activation of the extension in SGLang's scheduler process."""

from __future__ import annotations

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import dispatch, hooks, meta_info, runtime
from sgl_ext.engine.core.powers import ORDER
from sgl_ext.engine.kv import install, ownership
from sgl_ext.engine.step import admission, budget, cached_tokens, forward, graphs
from sgl_ext.engine.workarounds import (
    beams,
    empty_outputs,
    logprobs,
    penalties,
    rids,
    stop_patterns,
    validation,
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
    *empty_outputs.HOOKS,
    *forward.HOOKS,
    *graphs.HOOKS,
    *logprobs.HOOKS,
    *penalties.HOOKS,
    *rids.HOOKS,
    *stop_patterns.HOOKS,
    *(hook for kind in ORDER for hook in kind.hooks),
)


def activate(config: ExtConfig) -> None:
    """Activates the extension in this scheduler process. Repeating the call changes nothing.

    Raises:
        ActivationError: a hook cannot be applied.
    """
    if runtime.current is None or runtime.current.config != config:
        runtime.current = runtime.ExtRuntime(config)
    # The default lock of tqdm is a named semaphore, which a killed scheduler leaves behind.
    import threading

    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    # Hooks of other plugins come first, so that those of the extension are applied around them.
    from sglang.srt.plugins import load_plugins

    load_plugins()
    hooks.apply(HOOKS, forward.SEAMS)
