"""Chunks in programs that use ``sgl.Engine`` without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_ext.engine.chunks.offline import EngineContexts


def contexts_of(engine: Any, cache_salt: str | None = None) -> EngineContexts:
    """Returns the context cache of an ``sgl.Engine`` with a ``chunks`` section.

    The first call takes some seconds: it probes the model, as a server does before it is ready.

    Example::

        contexts = contexts_of(engine)
        (context,) = contexts.create(document)
        engine.generate(contexts.prompt("Read this. ", context, question))

    Args:
        cache_salt: Salt of the tenant. Requests that name its contexts must send the same one.

    Raises:
        ExtError: The engine has no ``chunks`` section, or its model cannot be served with it.
    """
    from sgl_ext.engine.chunks import offline

    return offline.contexts_of(engine, cache_salt)
