"""Where lending and borrowing meet SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.activation import refuse
from sgl_ext.engine.core.unserved import Unserved, require_served
from sgl_ext.errors import ExtError

_UNSERVED: Unserved = (
    ("tp_size", lambda size: size > 1, "tensor parallelism"),
    ("dp_size", lambda size: size > 1, "data parallelism"),
    ("enable_streaming_session", bool, "streaming sessions"),
    ("disaggregation_mode", lambda mode: mode != "null", "prefill-decode disaggregation"),
)


def declare(server_args: Any, config: ExtConfig) -> None:
    """Raises ActivationError if the arguments ask for something that peers do not serve."""
    if config.peer is not None:
        require_served(server_args, "peers", _UNSERVED)


def _open(scheduler: Any) -> None:
    """Before the server is ready, so that what is wrong ends it with the reason."""
    ext = runtime.current
    if ext is None or ext.config.peer is None or ext.peer is not None:
        return
    if ext.slab is None:
        refuse(
            hooks.ActivationError(
                f"peers lend blocks of the slab, and {ext.layer_major_because}: leave out peer"
            )
        )
    from sgl_ext.engine.peer.roles import open_side

    try:
        ext.peer = open_side(ext.config.peer, scheduler, ext.slab)
    except ExtError as error:
        refuse(hooks.ActivationError(f"peer: {error}"))


def _step(original: Callable[..., Any], scheduler: Any, running: Any) -> Any:
    if (ext := runtime.current) is None or ext.peer is None:
        return original(scheduler, running)
    from sglang.srt.runtime_context import get_observability

    ext.peer.step(running)
    result = original(scheduler, running)
    ext.peer.planned()
    if get_observability().enable_metrics:
        ext.peer.measure()
    return result


def _leave(_scheduler: Any) -> None:
    if (ext := runtime.current) is not None and ext.peer is not None:
        ext.peer.close()


def _report(result: Any, _scheduler: Any, _request: Any) -> Any:
    if (ext := runtime.current) is not None and ext.peer is not None:
        result.internal_state.setdefault("sgl_ext", {})["peer"] = ext.peer.describe()
    return result


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "before",
        _open,
        "nothing is called between the making of all parts of a scheduler and its ready message",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "around",
        _step,
        "a pool's size is looked at all over a step, and can change between two only",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        _report,
        "the live part of /server_info has a fixed set of contributors",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.release_host_resources",
        "before",
        _leave,
        "plugins are not told of a scheduler's orderly end",
    ),
)
