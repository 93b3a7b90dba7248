"""Chunks in programs of SGLang's frontend language."""

from __future__ import annotations

from typing import Any


def chunk(text_or_id: str, method: str | None = None) -> Any:
    """Returns an expression for a chunk whose KV is linked, at any position in the prompt.

    Usage: ``s += "Read this. " + chunk(document) + question``, also within roles and forks.

    A text is put into the context cache of the program's backend when a program first evaluates
    it. All programs on this backend then share the context, which is created again if the server
    has dropped it. The backend must be a ``RuntimeEndpoint`` of a server with a ``chunks``
    section. At least two tokens must lie between a chunk and ``select``, which needs their
    logprobs. A failure during evaluation becomes the error of the program (``state.error()``).

    Args:
        text_or_id: A text, or the id of a context. A string of the form ``ctx-…`` is an id.
        method: Name of the link method that a text is prepared for; if None, the server's default.
            Not allowed with an id, which is already prepared for a method.

    Raises:
        ExtError: The text is empty, or an id is given with a method.
        TypeError: ``text_or_id`` is not a str, as in a program that is only traced.
    """
    from sgl_ext.engine.chunks.frontend import Chunk

    return Chunk(text_or_id, method)
