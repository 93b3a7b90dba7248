"""The context service of SGLang's ``TokenizerManager``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgl_ext.config import Chunks
from sgl_ext.engine.core.activation import REPORT_KEY
from sgl_ext.engine.core.sglang_types import TokenizerManager
from sgl_ext.engine.front.fronts import fronts_of

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.service import ContextService


def context_service(
    manager: TokenizerManager, config: Chunks, info: Mapping[str, Any]
) -> ContextService:
    """Creates the context service of SGLang's ``TokenizerManager``.

    Args:
        info: ready message of the first scheduler.
    """
    from sgl_ext.engine.chunks.service import ContextService

    memory = info[REPORT_KEY]["memory"]
    return ContextService(
        manager,
        method=config.method,
        limit=config.limit,
        page=memory["page"],
        token_bytes=memory["block_bytes"] // memory["page"],
        pool=info["max_total_num_tokens"],
    )


def attached_contexts(manager: TokenizerManager) -> ContextService | None:
    """Returns the context service of a ``TokenizerManager``; None if it has none."""
    from sgl_ext.engine.chunks.service import ContextService

    return next((each for each in fronts_of(manager) if isinstance(each, ContextService)), None)
