"""Chunks in SGLang's frontend programs."""

from __future__ import annotations

from typing import Any


def chunk(text_or_id: str, method: str | None = None) -> Any:
    """An expression that stands for a chunk whose KV is linked, wherever in the prompt it is.

    ``s += "Read this. " + chunk(document) + question``, also within roles and forks. A text is put
    into the context cache of the program's backend when the program first comes to it, and once
    for all programs that run there; if the server has dropped it since, again. The backend must be
    a ``RuntimeEndpoint``, of a server with a ``chunks`` section. What goes wrong then is the
    program's error (``state.error()``), as everything is that a program does.

    Args:
        text_or_id: a text, or the id of a context; what looks like one (``ctx-…``) is one.
        method: name of the link method that a text is prepared for; the server's default without
            it. An id has its own.

    Raises:
        ExtError: empty, or an id with a method.
        TypeError: no str, as in a program that is only traced.
    """
    from sgl_ext.engine.chunks.frontend import Chunk

    return Chunk(text_or_id, method)
