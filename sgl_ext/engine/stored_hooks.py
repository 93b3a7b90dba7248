"""Where stored contexts meet SGLang: requests that follow one, and prompts that become one.

A request that follows a context has a prompt of its own tokens only. SGLang plans and caches these
as ever, under a name that says what they follow; only their positions, and what their attention
sees, begin behind the context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sgl_ext import runtime
from sgl_ext.clusters.recorded import Geometry
from sgl_ext.config import ExtConfig
from sgl_ext.engine import hooks
from sgl_ext.engine.activation import carried_by, refuse
from sgl_ext.engine.meta_info import tell
from sgl_ext.engine.stored_parameters import FollowsStored, read_stored
from sgl_ext.engine.unserved import Unserved, require_served
from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from sgl_ext.engine.stored_contexts import Follower

NAMESPACE = "ext:stored"
"""What SGLang's ``extra_key`` of requests that follow a context begins with."""

_SERVICE = "_ext_stored"
"""Attribute of SGLang's ``TokenizerManager``: the server's ``StoredService``."""

_UNSERVED: Unserved = (
    ("tp_size", lambda size: size > 1, "tensor parallelism"),
    ("enable_lora", bool, "LoRA adapters"),
    ("lora_paths", bool, "LoRA adapters"),
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

    from sgl_ext.engine import stored_api
    from sgl_ext.engine.stored_service import StoredService

    service = StoredService(manager, config.clusters, scheduler_infos[0]["max_total_num_tokens"])
    setattr(manager, _SERVICE, service)
    stored_api.install(app, service)


def _own(manager: Any, request: Any, *_args: Any) -> None:
    if (service := getattr(manager, _SERVICE, None)) is not None:
        service.own(request)


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
    from sgl_ext.engine.stored_contexts import StoredContexts
    from sgl_ext.engine.stored_recorder import Recorder

    config = ext.config.clusters
    try:
        geometry = _geometry(scheduler, ext.slab.layout)
        ext.stored = StoredContexts(config, geometry, scheduler.model_config.context_len)
        ext.recorder = Recorder(ext.slab, geometry, config.directories[0])
    except (ExtError, OSError) as error:
        refuse(hooks.ActivationError(f"clusters: {error}"))


def _geometry(scheduler: Any, layout: Any) -> Geometry:
    """Of the model that is served; raises ExtError if clusters do not serve it."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    from sgl_ext.engine.cpu.native_attention import NativeAttention, native_attention

    model = scheduler.tp_worker.model_runner.model
    layers = [each for each in model.modules() if isinstance(each, RadixAttention)]
    shapes = {
        (each.tp_q_head_num, each.tp_k_head_num, each.head_dim, float(each.scaling))
        for each in layers
    }
    if len(layers) != layout.layers or len(shapes) != 1:
        raise ExtError(
            f"the model has {len(layers)} layers of attention of {len(shapes)} shapes, and "
            f"{layout.layers} layers of KV; clusters serve models whose layers are all alike"
        )
    if any(each.sliding_window_size > -1 or each.logit_cap for each in layers):
        raise ExtError("clusters do not serve sliding windows or capped attention logits")
    ((heads, kv_heads, head_dim, scale),) = shapes
    sample = torch.empty(1, kv_heads, head_dim, dtype=getattr(torch, layout.dtype))
    if native_attention() is None or not NativeAttention.serves(sample, sample, sample, scale):
        raise ExtError(
            f"the compiled attention does not serve {layout.dtype} with heads of {head_dim} here, "
            "and torch's reads no stored contexts"
        )
    return Geometry(
        layout.layers, heads, kv_heads, head_dim, layout.dtype, scale, layout.fingerprint
    )


def _check(_scheduler: Any, req: Any, *_args: Any, **_kw: Any) -> None:
    """A request that asks for what cannot be ends by itself, not the scheduler."""
    ext = runtime.current
    if ext is None or ext.stored is None or ext.recorder is None or req.to_finish is not None:
        return
    try:
        asked = read_stored(req)
        if isinstance(asked, FollowsStored):
            follower = ext.stored.ask(req, asked)
            key = f"{NAMESPACE}:{follower.id}:{follower.share:g}"
            if not (req.extra_key or "").startswith(key):  # it may come again, after a retraction
                req.extra_key = f"{key}:{req.extra_key}" if req.extra_key else key
                tell(
                    req,
                    {
                        "power": "clusters", "exact": follower.share >= 1, "context": follower.id,
                        "tokens": follower.tokens, "sparsity": follower.share,
                    },
                )  # fmt: skip
            _limit_answer(req, ext.stored.longest, follower)
        elif asked is not None:
            ext.recorder.ask(req.rid, asked)
    except (ExtError, ValueError) as error:
        status = error.status if isinstance(error, ExtError) else HTTPStatus.BAD_REQUEST
        req.set_finish_with_abort(str(error), status)


def _limit_answer(req: Any, longest: int, follower: Follower) -> None:
    """Context, prompt and answer have no more tokens than the model takes."""
    room = longest - follower.tokens - len(req.origin_input_ids) - 1
    params = req.sampling_params
    params.max_new_tokens = min(params.max_new_tokens, max(room, 0))


def ready(req: Any) -> bool:
    """Whether what a request follows is open; it is its turn."""
    ext = runtime.current
    if ext is None or ext.stored is None:
        return True
    try:
        return ext.stored.ready(req.rid)
    except ExtError as error:
        ext.stored.refused[req.rid] = str(error)
        return False


def _step(original: Callable[..., Any], scheduler: Any, running: Any) -> Any:
    ext = runtime.current
    if ext is None or ext.stored is None or ext.recorder is None:
        return original(scheduler, running)
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
        from sglang.srt.managers.io_struct import AbortReq

        for rid, message in ext.stored.refused.items():
            reason = {"type": "abort", "status_code": 400, "message": message}
            scheduler.abort_request(
                AbortReq(rid=rid, abort_message=message, finished_reason=reason)
            )
        ext.stored.refused.clear()
    return original(scheduler, running)


def _forward(original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    """Positions begin behind what a request follows."""
    ext = runtime.current
    if ext is None or ext.stored is None or not ext.stored.any:
        return original(runner, batch, *args, **kw)
    followers = [ext.stored.follower(rid) for rid in batch.rids]
    if any(followers):
        import torch

        behind = torch.tensor([0 if each is None else each.tokens for each in followers])
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
    prompt = req.origin_input_ids
    slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(prompt)].long()
    if recorded := ext.recorder.ended(req.rid, prompt, slots):
        tell(req, {"power": "clusters", "recorded": recorded})


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
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        _report,
        "the live part of /server_info has a fixed set of contributors",
    ),
)
