"""Where chunks meet SGLang: requests as they come in, and requests as they reach the scheduler."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sgl_ext.config import Chunks, ExtConfig
from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.activation import carried_by, refuse
from sgl_ext.engine.core.unserved import Unserved, require_served
from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from sgl_ext.chunks.contexts import Context
    from sgl_ext.engine.chunks.service import ContextService

logger = logging.getLogger(__name__)

_SERVICE = "_ext_contexts"
"""Attribute of SGLang's ``TokenizerManager``: the server's ``ContextService``."""


class RefusedError(ValueError):
    """What SGLang's routes answer with ``status_code``; its other errors end in a 500."""

    def __init__(self, error: ExtError) -> None:
        super().__init__(str(error))
        self.status_code = error.status


_UNSERVED: Unserved = (
    ("enable_return_hidden_states", bool, "hidden states in answers"),
    ("enable_streaming_session", bool, "streaming sessions"),
    ("skip_tokenizer_init", bool, "no tokenizer"),
    ("enable_lora", bool, "LoRA adapters"),
    ("lora_paths", bool, "LoRA adapters"),
)


def declare(server_args: Any, config: ExtConfig) -> None:
    """Raises ActivationError if the arguments ask for something that chunks do not serve."""
    if config.chunks is not None:
        require_served(server_args, "chunks", _UNSERVED)


def _serve(
    server_args: Any,
    tokenizer_manager: Any,
    _templates: Any,
    _ports: Any,
    scheduler_infos: list[dict[str, Any]],
    *_args: Any,
    **_kw: Any,
) -> None:
    """Adds the routes before the HTTP server starts."""
    config = carried_by(server_args)
    if config is None or config.chunks is None:
        return
    from sglang.srt.entrypoints.http_server import app

    from sgl_ext.engine.chunks import api as context_api

    service = attach_contexts(tokenizer_manager, config.chunks, scheduler_infos)
    context_api.install(app, service, config.chunks)


def attach_contexts(manager: Any, config: Chunks, scheduler_infos: Any) -> ContextService:
    """From now on what SGLang's ``TokenizerManager`` is asked may name contexts."""
    from sgl_ext.engine.chunks.service import ContextService
    from sgl_ext.engine.core.scheduler import REPORT_KEY

    info = scheduler_infos[0]
    memory = info[REPORT_KEY]["memory"]
    service = ContextService(
        manager,
        method=config.method,
        limit=config.limit,
        page=memory["page"],
        token_bytes=memory["block_bytes"] // memory["page"],
        pool=info["max_total_num_tokens"],
    )
    setattr(manager, _SERVICE, service)
    return service


def attached_contexts(manager: Any) -> ContextService | None:
    """Those of a ``TokenizerManager``, if it has any."""
    return getattr(manager, _SERVICE, None)


def _probe(original: Callable[..., None], server_args: Any, *args: Any, **kw: Any) -> None:
    """Before the server is ready, and in the thread that makes it so."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    state = http_server.get_global_state()
    service = None if state is None else attached_contexts(state.tokenizer_manager)
    config = carried_by(server_args)
    if service is not None and config is not None and config.chunks is not None:
        try:
            _look_at(server_args, service, config.chunks, http_server.ssl_verify_of(server_args))
        except Exception as error:
            # As SGLang does when its warm-up fails; this thread cannot end the process otherwise.
            logger.error("sgl_ext: %s", error, exc_info=not isinstance(error, ExtError))
            kill_process_tree(os.getpid())
            return
    original(server_args, *args, **kw)


def _look_at(server_args: Any, service: ContextService, chunks: Chunks, verify: Any) -> None:
    """Raises ExtError if the model must not be served with chunks."""
    from sgl_ext.engine.chunks.fidelity import probe_over_http, require

    url, key = server_args.url(), server_args.api_key
    service.fidelity = probe_over_http(url, key, service.encode, verify=verify).measure()
    if server_args.enable_metrics:
        from sgl_ext.engine.chunks.metrics import export

        export(service.fidelity, chunks.method)
    require(service.fidelity, chunks.method, chunks.largest_divergence)


async def _generate(
    original: Callable[..., AsyncIterator[Any]], manager: Any, request: Any, *args: Any
) -> AsyncIterator[Any]:
    service = attached_contexts(manager)
    named: list[Context] = []
    if service is not None:
        try:
            service.own(request)
            named = service.link(request)
        except ExtError as error:
            with suppress(ValueError):
                request.normalize_batch_and_arguments()  # SGLang ends streams by what this sets
            raise RefusedError(error) from None
    told: list[Any] = []
    async for answer in original(manager, request, *args):
        if service is not None and named:
            metas = [one["meta_info"] for one in (answer if isinstance(answer, list) else [answer])]
            told += (each for meta in metas for each in meta.get("ext", ()))
            # Before it is handed on: who waits for one answer does not ask for a second.
            if told and metas[-1]["finish_reason"] is not None:
                service.renewal.answered(named, missing=any(each.get("missing") for each in told))
        yield answer


def _open(result: Any, scheduler: Any) -> Any:
    ext = runtime.current
    if ext is not None and ext.config.chunks is not None and ext.links is None:
        from sglang.srt.runtime_context import get_observability, get_parallel

        from sgl_ext.engine.chunks.links import open_links

        try:
            ext.links = open_links(scheduler, ext)
        except hooks.ActivationError as error:
            refuse(error)
        if get_observability().enable_metrics:
            from sgl_ext.engine.chunks.metrics import LinkMetrics

            ext.link_metrics = LinkMetrics(get_parallel().tp_rank)
    return result


def _check(_scheduler: Any, req: Any, *_args: Any, **_kw: Any) -> None:
    """A composition that cannot be ends its own request, not the scheduler."""
    if (ext := runtime.current) is None or ext.links is None:
        return
    if ext.swap is not None and req.rid in ext.swap:
        return  # checked when it came; it needs its chunks only if its KV is lost
    from sglang.srt.runtime_context import get_parallel

    from sgl_ext.engine.chunks.parameters import read_parameters

    if req.to_finish is not None:
        return  # SGLang has found something wrong with it
    try:
        read_parameters(req, get_parallel().tp_size)
    except ValueError as error:
        req.set_finish_with_abort(str(error))
    ext.links.ask(req)


LAUNCHER_HOOKS = (
    hooks.Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "before",
        _serve,
        "SGLang's server takes no further routes",
    ),
    hooks.Hook(
        "sglang.srt.entrypoints.http_server._wait_and_warmup",
        "around",
        _probe,
        "SGLang's own warm-up request is the last thing that can keep a server from being ready",
    ),
    hooks.Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "around",
        _generate,
        "text is tokenised as a whole; contexts have tokens of their own",
    ),
)

HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "after",
        _open,
        "model, pool and tree are there when a scheduler says that it is ready, not before",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        "before",
        _check,
        "SGLang checks what it knows of requests",
    ),
)
