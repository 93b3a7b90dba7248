"""Chunks in programs that use ``sgl.Engine``, without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.offline import EngineContexts


def contexts_of(engine: Any, cache_salt: str | None = None) -> EngineContexts:
    """The context cache of an ``sgl.Engine`` with a ``chunks`` section.

    The first call takes some seconds: the model is probed, as a server does before it is ready.
    A prompt is then ``contexts.prompt("Read this. ", context, question)``.

    Args:
        cache_salt: whose contexts these are; requests that name them must send the same one.

    Raises:
        ExtError: the engine has no ``chunks`` section, or its model cannot be served with it.
    """
    from sgl_ext.engine.chunks import offline

    return offline.contexts_of(engine, cache_salt)
