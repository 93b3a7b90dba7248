"""Measurement of the fidelity of linked chunks before the server is ready."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from sgl_ext.config import Chunks
from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.activation import carried_by
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import ServerArgs
from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.service import ContextService

logger = logging.getLogger(__name__)


def _probe(original: Original, server_args: ServerArgs, *args: object, **kw: object) -> None:
    """Measures the fidelity before SGLang's warm-up, in its thread; ends the server on failure."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sgl_ext.engine.chunks.service import attached_contexts

    config, state = carried_by(server_args), http_server.get_global_state()
    chunks = None if config is None or state is None else config.chunks
    service = None if chunks is None else attached_contexts(state.tokenizer_manager)
    if chunks is not None and service is not None:
        try:
            _look_at(server_args, service, chunks, http_server.ssl_verify_of(server_args))
        except Exception as error:
            # As SGLang does when its warm-up fails: an exception would not end the process.
            logger.error("sgl_ext: %s", error, exc_info=not isinstance(error, ExtError))
            kill_process_tree(os.getpid())
            return
    original(server_args, *args, **kw)


def _look_at(
    server_args: ServerArgs, service: ContextService, chunks: Chunks, verify: bool | str
) -> None:
    """Measures and exports the fidelity; raises ExtError if it does not meet the bounds."""
    from sgl_ext.engine.chunks.fidelity import probe_over_http, require

    url, key = server_args.url(), server_args.api_key
    service.fidelity = probe_over_http(url, key, service.encode, verify=verify).measure()
    if server_args.enable_metrics:
        from sglang.srt.runtime_context import get_serving

        from sgl_ext.engine.chunks.metrics import export
        from sgl_ext.engine.core.metrics import Metrics

        labels = {"model_name": get_serving().served_model_name}
        export(service.fidelity, chunks.method, Metrics(labels))
    require(service.fidelity, chunks.method, chunks.largest_divergence)


LAUNCHER_HOOKS = (
    hooks.Hook(
        "sglang.srt.entrypoints.http_server._wait_and_warmup",
        "around",
        _probe,
        "SGLang's own warm-up request is the last step that can prevent a server from becoming "
        "ready",
    ),
)
