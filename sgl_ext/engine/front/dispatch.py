"""Dispatch to the powers in the process that runs SGLang's HTTP server and tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.activation import carried_by, refuse
from sgl_ext.engine.core.power import Answer
from sgl_ext.engine.core.sglang_types import GenerateReqInput, ServerArgs, TokenizerManager
from sgl_ext.engine.front import errors, openai_reports
from sgl_ext.engine.front.bodies import add_innermost
from sgl_ext.engine.front.fronts import add_front, fronts_of
from sgl_ext.engine.front.off_params import OffParams
from sgl_ext.engine.front.top_params import TopParams
from sgl_ext.engine.workarounds import validation
from sgl_ext.errors import ExtError


def _serve(
    server_args: ServerArgs,
    manager: TokenizerManager,
    _templates: object,
    _ports: object,
    scheduler_infos: list[dict[str, object]],
    *_args: object,
    **_kw: object,
) -> None:
    """Adds routes, error handlers and fronts before the HTTP server starts."""
    if (config := carried_by(server_args)) is None:
        return
    from sglang.srt.entrypoints.http_server import app

    from sgl_ext.engine.core.powers import ORDER, powers_of

    for power in powers_of(config):
        try:
            front = power.serve(app, manager, scheduler_infos[0])
        except ExtError as error:
            refuse(error)
        if front is not None:
            add_front(manager, front)
    on = config.sections()
    off = [kind for kind in ORDER if kind.name not in on]
    if params := {kind.param: kind.name for kind in off if kind.param}:
        add_front(manager, OffParams(params))
    add_innermost(app, TopParams, keys={kind.param for kind in ORDER if kind.param})
    app.add_middleware(openai_reports.OpenaiReports)
    # The middleware that is added last is the outermost one, and sees what the others raise.
    errors.install(app, {kind.name: kind.path for kind in off if kind.path})


async def _generate(
    original: Callable[..., AsyncIterator[Answer]],
    manager: TokenizerManager,
    request: GenerateReqInput,
    /,  # SGLang's gRPC bridge passes its own request by the name ``request``
    *args: object,
    **kw: object,
) -> AsyncIterator[Answer]:
    watches = []
    # SGLang's gRPC bridge has no HTTP request and passes an object of its own.
    http = args[0] if args else kw.get("request")
    validation.check_count(manager, request, http)  # fronts replace short marks by long texts
    for front in reversed(fronts_of(manager)):
        try:
            watch = front.accept(request)
        except ExtError as error:
            with suppress(ValueError):
                request.normalize_batch_and_arguments()  # SGLang needs its results to end streams
            raise errors.RefusedError(error) from None
        if watch is not None:
            watches.append(watch)
    validation.check_shape(manager, request)
    async for answer in original(manager, request, *args, **kw):
        for watch in watches:
            watch(answer)
        openai_reports.keep(http, answer)
        yield answer


LAUNCHER_HOOKS = (
    hooks.Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "before",
        _serve,
        "SGLang's server does not accept additional routes",
    ),
    hooks.Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "around",
        _generate,
        "SGLang tokenizes whole texts and expands batches before it checks their number",
    ),
)
