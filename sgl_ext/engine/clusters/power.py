"""Where stored contexts meet SGLang: requests that follow one, and prompts that become one.

A request that follows a context has a prompt of its own tokens only. SGLang plans and caches these
as ever, under a name that says what they follow; only their positions, and what their attention
sees, begin behind the context.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from sgl_ext.config import ExtConfig
from sgl_ext.engine.chunks.power import RefusedError
from sgl_ext.engine.clusters.parameters import FollowsStored, read_stored
from sgl_ext.engine.core import hooks, runtime, weight_updates
from sgl_ext.engine.core.activation import carried_by, refuse
from sgl_ext.engine.core.meta_info import tell, told
from sgl_ext.engine.core.unserved import Unserved, require_served
from sgl_ext.errors import ExtError

_POWER = "clusters"
logger = logging.getLogger(__name__)

NAMESPACE = "ext:stored"
"""What SGLang's ``extra_key`` of requests that follow a context begins with."""

_SERVICE = "_ext_stored"
"""Attribute of SGLang's ``TokenizerManager``: the server's ``StoredService``."""

_UNSERVED: Unserved = (
    ("tp_size", lambda size: size > 1, "tensor parallelism"),
    ("enable_lora", bool, "LoRA adapters"),
    ("lora_paths", bool, "LoRA adapters"),
    ("enable_streaming_session", bool, "streaming sessions"),
    ("disaggregation_mode", lambda mode: mode != "null", "prefill-decode disaggregation"),
)


def declare(server_args: Any, config: ExtConfig) -> None:
    """Raises ActivationError if the arguments ask for something that clusters do not serve."""
    if config.clusters is not None:
        require_served(server_args, "clusters", _UNSERVED)


def _serve(
    server_args: Any,
    manager: Any,
    _templates: Any,
    _ports: Any,
    scheduler_infos: list[dict[str, Any]],
    *_args: Any,
    **_kw: Any,
) -> None:
    """Adds the routes before the HTTP server starts."""
    config = carried_by(server_args)
    if config is None or config.clusters is None:
        return
    from sglang.srt.entrypoints.http_server import app

    from sgl_ext.engine.clusters import api as stored_api
    from sgl_ext.engine.clusters.service import StoredService
    from sgl_ext.engine.core.scheduler import REPORT_KEY

    info = scheduler_infos[0]
    memory = info[REPORT_KEY]["memory"]
    service = StoredService(
        manager, config.clusters, pool=info["max_total_num_tokens"], layers=memory["layers"],
        entry_bytes=memory["block_bytes"] // memory["page"] // memory["layers"],
    )  # fmt: skip
    setattr(manager, _SERVICE, service)
    stored_api.install(app, service)


def _own(manager: Any, request: Any, *_args: Any) -> None:
    if (service := getattr(manager, _SERVICE, None)) is None:
        return
    try:
        service.own(request)
    except ExtError as error:
        with suppress(ValueError):
            request.normalize_batch_and_arguments()  # SGLang ends streams by what this sets
        raise RefusedError(error) from None


def _open(scheduler: Any) -> None:
    """Before the server is ready, so that what is wrong ends it with the reason."""
    ext = runtime.current
    if ext is None or ext.config.clusters is None or ext.stored is not None:
        return
    if ext.slab is None:
        refuse(
            hooks.ActivationError(
                f"clusters store blocks of the slab, and {ext.layer_major_because}: leave out "
                "clusters"
            )
        )
    from sgl_ext.clusters.files import own_folders, sweep
    from sgl_ext.engine.clusters.contexts import StoredContexts
    from sgl_ext.engine.clusters.geometry import geometry_of
    from sgl_ext.engine.clusters.recorder import Recorder

    config = ext.config.clusters
    try:
        folders = own_folders(config.directories)
        if left := sweep(folders):
            logger.info("removed what is left of contexts that were not stored: %s", left)
        geometry = geometry_of(scheduler, ext.slab.layout)
        ext.stored = StoredContexts(config, geometry, scheduler.model_config.context_len)
        ext.recorder = Recorder(ext.slab, geometry, folders[0])
        if config.prefetch:
            from sgl_ext.engine.clusters.prefetch import Prefetch

            runner = scheduler.tp_worker.model_runner
            Prefetch(runner.model, runner.token_to_kv_pool, ext.stored, config.prefetch)
    except (ExtError, OSError) as error:
        refuse(hooks.ActivationError(f"clusters: {error}"))


def _check(_scheduler: Any, req: Any, *_args: Any, **_kw: Any) -> None:
    """A request that asks for what cannot be ends by itself, not the scheduler."""
    ext = runtime.current
    if ext is None or ext.stored is None or ext.recorder is None or req.to_finish is not None:
        return
    try:
        asked = read_stored(req)
        if isinstance(asked, FollowsStored):
            if ext.stored.follower(req.rid) is None:  # not again, after a retraction
                follower = ext.stored.ask(req, asked)
                key = f"{NAMESPACE}:{follower.id}:{follower.share!r}"
                req.extra_key = f"{key}:{req.extra_key}" if req.extra_key else key
        elif asked is not None:
            ext.recorder.ask(req.rid, asked)
    except (ExtError, ValueError) as error:
        _refuse(req, error)


def _refuse(req: Any, error: Exception) -> None:
    # SGLang runs what it refuses as a prompt of one token, which follows nothing: its KV is none of
    # the name that it was given.
    req.skip_radix_cache_insert = True
    status = error.status if isinstance(error, ExtError) else HTTPStatus.BAD_REQUEST
    req.set_finish_with_abort(str(error), status)


def ready(req: Any) -> bool:
    """Whether what a request follows is open; it is its turn."""
    ext = runtime.current
    if ext is None or ext.stored is None:
        return True
    try:
        opened = ext.stored.opened(req.rid)
    except ExtError as error:
        ext.stored.refuse(req.rid, error)
        return False
    follower = ext.stored.follower(req.rid)
    if opened and follower is not None and not told(req, _POWER):
        tell(
            req,
            {
                "power": _POWER, "exact": follower.share >= 1, "context": follower.id,
                "tokens": follower.tokens, "sparsity": follower.share,
            },
        )  # fmt: skip
    return opened


def _step(original: Callable[..., Any], scheduler: Any, running: Any) -> Any:
    ext = runtime.current
    if ext is None or ext.stored is None or ext.recorder is None:
        return original(scheduler, running)
    from sglang.srt.runtime_context import get_observability

    ext.stored.tidy()
    if get_observability().enable_metrics:
        ext.stored.measure()
    if ext.stored.any or ext.recorder.any:
        present = {
            req.rid
            for req in (
                *scheduler.waiting_queue,
                *scheduler.collect_inflight_reqs(),
                *scheduler.grammar_manager.grammar_queue,
                *running.reqs,
                *(() if scheduler.chunked_req is None else (scheduler.chunked_req,)),
            )
        }
        ext.stored.keep(present)
        ext.recorder.keep(present)
    if ext.stored.refused:
        for req in scheduler.waiting_queue:
            if (error := ext.stored.refused.get(req.rid)) is not None:
                _refuse(req, error)
        ext.stored.refused.clear()
    return original(scheduler, running)


def _weights_changed(_updater: Any, *_args: Any, **_kw: Any) -> None:
    """Contexts are of the weights that the server was started with."""
    ext = runtime.current
    if ext is None or ext.stored is None or ext.recorder is None:
        return
    message = "an update of the model's weights began; restart to follow stored contexts again"
    ext.recorder.stale = message
    ext.stored.give_up(message)


def _forward(original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    """Positions begin behind what a request follows."""
    ext = runtime.current
    if ext is None or ext.stored is None or not ext.stored.any:
        return original(runner, batch, *args, **kw)
    followers = [ext.stored.follower(rid) for rid in batch.rids]
    if any(followers):
        import torch

        behind = torch.tensor([0 if each is None else each.tokens for each in followers])
        # Behind the rows of requests those of beams may follow, which follow no context.
        behind = torch.nn.functional.pad(behind, (0, batch.batch_size - len(behind)))
        if not batch.forward_mode.is_decode_or_idle():
            behind = behind.repeat_interleave(torch.tensor(batch.extend_seq_lens_cpu))
        batch = copy.copy(batch)
        batch.positions = batch.positions + behind.to(batch.positions)
    return original(runner, batch, *args, **kw)


def _on_checkpoint(tree: Any, req: Any, *_args: Any, **_kw: Any) -> None:
    """A request that has ended gives its KV to the tree; a moment later it has no slots."""
    ext = runtime.current
    if ext is None or ext.recorder is None or not ext.recorder.any or not req.finished():
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    prompt = req.origin_input_ids
    if isinstance(req.finished_reason, FINISH_ABORT):
        ext.recorder.ended(req.rid, prompt, None)
        return
    slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(prompt)].long()
    if recorded := ext.recorder.ended(req.rid, prompt, slots):
        tell(req, {"power": _POWER, "recorded": recorded})


def _on_release(_tree: Any, req: Any, *, checkpointed: bool) -> None:
    ext = runtime.current
    if ext is not None and ext.recorder is not None and not checkpointed:
        ext.recorder.ended(req.rid, (), None)


def _report(result: Any, _scheduler: Any, _request: Any) -> Any:
    if (ext := runtime.current) is not None and ext.stored is not None:
        result.internal_state.setdefault("sgl_ext", {})["clusters"] = ext.stored.describe()
    return result


def _on_finish(req: Any, new_accepted_len: int = 1) -> None:
    """What comes of a forward that a device has failed is no token."""
    ext = runtime.current
    if ext is None or ext.stored is None or req.rid not in ext.stored.given_up:
        return
    ext.stored.given_up.discard(req.rid)
    if new_accepted_len and req.output_ids:
        req.output_ids.pop()


LAUNCHER_HOOKS = (
    hooks.Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "before",
        _serve,
        "SGLang's server takes no further routes",
    ),
    hooks.Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "before",
        _own,
        "schedulers are told by custom_params, which users write, too",
    ),
)

_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "before",
        _open,
        "nothing is called between the making of all parts of a scheduler and its ready message",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        "before",
        _check,
        "SGLang checks what it knows of requests",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "around",
        _step,
        "a request that waits for more than memory is ended by nobody else",
    ),
    hooks.Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "around",
        _forward,
        "positions are counted from the prompt's first token",
    ),
    hooks.Hook(
        f"{_TREE}.checkpoint",
        "before",
        _on_checkpoint,
        "the KV of a request that ends has no other owner than its tree",
    ),
    hooks.Hook(
        f"{_TREE}.on_release",
        "before",
        _on_release,
        "a request that is retracted or aborted tells its tree only",
    ),
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "before",
        _on_finish,
        "SGLang takes every forward's result for a token",
    ),
    *(
        hooks.Hook(
            f"{weight_updates.UPDATER}.{method}",
            "before",
            _weights_changed,
            "nobody is told that the weights change",
        )
        for method in weight_updates.METHODS
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        _report,
        "the live part of /server_info has a fixed set of contributors",
    ),
)
