"""Refusal of requests that would end SGLang's processes, from any route or program."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.activation import carried_by
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.releases import send_abort
from sgl_ext.engine.core.sglang_types import (
    GenerateReqInput,
    Req,
    Scheduler,
    TokenizedReqInput,
    TokenizerManager,
)
from sgl_ext.engine.workarounds import embeddings, rids, stop_patterns
from sgl_ext.engine.workarounds.checks import (
    NO_TOKENS,
    check_labels,
    check_request,
    check_size,
    check_types,
    malformed_is_refused,
    prompts_of,
    sampling_fields,
)

logger = logging.getLogger(__name__)


def check_count(manager: TokenizerManager, request: GenerateReqInput, http: object = None) -> None:
    """Checks the ids and the number of answers of a request before its prompts are rewritten.

    Args:
        http: request of SGLang's HTTP server, or None.

    Raises:
        ValueError: there are too many, an id is reserved, or the request cannot be read.
    """
    if carried_by(manager.server_args) is not None:
        with _never_sent(request), malformed_is_refused("the request"):
            check_size(request.sampling_params, prompts_of(request))
            rids.check(request, http)


def check_shape(manager: TokenizerManager, request: GenerateReqInput) -> None:
    """Checks a request before SGLang expands it into its prompts and answers.

    Raises:
        ValueError: the request cannot be served or read.
    """
    if carried_by(manager.server_args) is not None:
        with _never_sent(request):
            if (args := manager.server_args).enable_metrics:
                check_labels(
                    getattr(request, "custom_labels", None),
                    args.tokenizer_metrics_allowed_custom_labels,
                )
            with malformed_is_refused("the request"):
                copy.copy(request).normalize_batch_and_arguments()


@contextmanager
def _never_sent(request: GenerateReqInput) -> Iterator[None]:
    """Leaves a request that is refused with nothing for SGLang to abort."""
    try:
        yield
    except ValueError:
        request.is_single, request.rid = False, []
        raise


def _validate(
    original: Original, manager: TokenizerManager, request: GenerateReqInput, ids: object
) -> None:
    if carried_by(manager.server_args) is None:
        return original(manager, request, ids)
    check_types(request.sampling_params, sampling_fields(manager.sampling_params_class))
    with malformed_is_refused("the request"):
        original(manager, request, ids)
    return None


def _tokenized(
    original: Original, manager: TokenizerManager, request: GenerateReqInput, *args: object
) -> object:
    """Checks the values of a tokenized request before it is sent to the scheduler."""
    if carried_by(manager.server_args) is None:
        return original(manager, request, *args)
    model = manager.model_config
    with malformed_is_refused("the request"):
        overrides = getattr(request, "embed_overrides", None)  # SGLang makes one tensor of them
        embeddings.check_widths("embed_overrides", overrides, model.hidden_size)
        made = original(manager, request, *args)
        check_request(made, model.vocab_size, manager.context_len)
        embeddings.check(made, model)
        stop_patterns.require_served(made.sampling_params, manager.server_args)
    return made


def _dispatch(original: Original, manager: TokenizerManager, message: object) -> None:
    """Refuses a message that cannot be encoded."""
    if carried_by(manager.server_args) is not None:
        with malformed_is_refused("the request"):
            return original(manager, message)
    return original(manager, message)


def _handle(
    original: Original, scheduler: Scheduler, request: TokenizedReqInput, **kw: object
) -> None:
    """Ends a request that the scheduler cannot accept, without ending the scheduler."""
    if runtime.current is None:
        return original(scheduler, request, **kw)
    try:
        embeddings.require_served(scheduler, request)
        original(scheduler, request, **kw)
    except Exception as error:
        logger.exception("request %r is refused", request.rid)
        from sglang.srt.managers.io_struct import AbortReq

        message = f"the server cannot accept this request: {error!s:.300}"
        reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": message}
        abort = AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)
        send_abort(scheduler, abort, request)
    return None


def check_prompt(req: Req) -> None:
    """Ends a request without prompt tokens. Only the scheduler knows the prompt of a session."""
    if req.to_finish is None and not req.origin_input_ids:
        req.set_finish_with_abort(NO_TOKENS)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
LAUNCHER_HOOKS = (
    hooks.Hook(
        f"{_MANAGER}._validate_one_request",
        "around",
        _validate,
        "SGLang does not check the types of these values",
    ),
    hooks.Hook(
        f"{_MANAGER}._create_tokenized_object",
        "around",
        _tokenized,
        "SGLang's checks accept values that terminate its scheduler",
    ),
    hooks.Hook(
        f"{_MANAGER}._dispatch_to_scheduler",
        "around",
        _dispatch,
        "SGLang's routes answer with 500 if a request cannot be encoded",
    ),
)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    hooks.Hook(
        f"{_SCHEDULER}.handle_generate_request",
        "around",
        _handle,
        "SGLang's scheduler terminates on a request that it cannot accept",
    ),
    hooks.Hook(
        f"{_SCHEDULER}.handle_embedding_request",
        "around",
        _handle,
        "SGLang's scheduler terminates on a request that it cannot accept",
    ),
)
