"""Attachment of the context service to SGLang's ``TokenizerManager``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgl_ext.config import Chunks
from sgl_ext.engine.core.activation import REPORT_KEY
from sgl_ext.engine.core.sglang_types import TokenizerManager

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.service import ContextService

_SERVICE = "_ext_contexts"
"""Attribute of SGLang's ``TokenizerManager`` that holds its ``ContextService``."""


def attach_contexts(
    manager: TokenizerManager, config: Chunks, info: Mapping[str, Any]
) -> ContextService:
    """Creates the context service of SGLang's ``TokenizerManager`` and attaches it.

    Args:
        info: ready message of the first scheduler.
    """
    from sgl_ext.engine.chunks.service import ContextService

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


def attached_contexts(manager: TokenizerManager) -> ContextService | None:
    """Returns the context service of a ``TokenizerManager``; None if it has none."""
    return getattr(manager, _SERVICE, None)
