"""Middleware for contexts in the bodies of SGLang's own routes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar, TypeGuard

from starlette.types import ASGIApp

from sgl_ext.chunks.contexts import Contexts
from sgl_ext.engine.chunks.parameters import MARKED
from sgl_ext.engine.front.bodies import Bodies, object_of
from sgl_ext.errors import ExtError
from sgl_ext.marks import ids_in, mark, marked

_PART = "ext_context"
"""Type of a part of a message or of a prompt that names a context."""
_SIGNS = (f'"{_PART}"'.encode(), mark("")[0].encode(), rb"\ue0c0", rb"\uE0C0")
"""Byte strings of which every body that names a context has at least one, also if the user has
written marks."""
_PROMPTS = {"/generate": "text", "/v1/completions": "prompt"}
"""Field of the prompt by the path of the route, where it is no chat."""


class Parts(Bodies):
    """ASGI middleware that replaces parts that name a context by marks in the text.

    SGLang's schema accepts a fixed set of part types, and marks are text to it. The ``text`` of
    ``/generate`` and the ``prompt`` of ``/v1/completions`` may be a list of parts, as in a chat
    message, and of strings.

    Args:
        app: ASGI application behind the middleware.
        contexts: registry of the contexts.
        automatic: whether a part whose text is that of a context is replaced, too.
    """

    paths: ClassVar = frozenset({*_PROMPTS, "/v1/chat/completions", "/invocations"})

    def __init__(self, app: ASGIApp, contexts: Contexts, automatic: bool) -> None:
        super().__init__(app)
        self._contexts = contexts
        self._automatic = automatic

    def concerns(self, path: str, body: bytes) -> bool:
        parts = b'"type"' in body and (self._automatic or path in _PROMPTS)
        return parts or any(sign in body for sign in _SIGNS)

    def needs(self, body: bytes) -> bool:
        return _SIGNS[0] in body

    def rewrite(self, path: str, request: dict[str, Any]) -> None:
        """Puts marks in place of the parts that name contexts.

        Raises:
            ExtError: a context does not exist, or a part or a field is malformed.
        """
        salt = request.get("cache_salt")
        messages = request.get("messages")
        names = False
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                content = message.get("content")
                if isinstance(content, list):
                    message["content"] = content = [self._chat_part(each, salt) for each in content]
                for id_ in chain.from_iterable(map(ids_in, _texts(content))):
                    self._contexts.get(id_, _salt(salt))  # SGLang would report another error
                    names = True
        if names:  # SGLang tokenizes a chat before the context service sees it
            request["custom_params"] = {**object_of(request, "custom_params"), MARKED: True}
        if (field := _PROMPTS.get(path)) is None:
            return
        prompt = request.get(field)
        if isinstance(prompt, list) and any(map(_is_part, prompt)):
            request[field] = prompt = "".join(self._text(part, salt) for part in prompt)
        if request.get("echo") and any(map(marked, _texts(prompt))):
            raise ExtError(
                "echo does not support prompts with contexts, whose texts are not in the prompt; "
                "omit it"
            )

    def _chat_part(self, part: object, salt: object) -> object:
        mark = self._mark(part, salt)
        return part if mark is None else {"type": "text", "text": mark}

    def _text(self, part: object, salt: object) -> str:
        """Returns the text that a part of a prompt stands for."""
        found: object = part if isinstance(part, str) else self._mark(part, salt)
        if found is None and _is_part(part) and part["type"] == "text":
            found = part.get("text")
        if not isinstance(found, str):
            raise ExtError(
                "a part of a prompt must be a string, {'type': 'text', 'text': …} or {'type': "
                f"'{_PART}', 'id': …}}, found {part!r:.200}"
            )
        return found

    def _mark(self, part: object, salt: object) -> str | None:
        """Returns the mark that replaces a part; None if the part is not a context.

        Raises:
            ExtError: the context does not exist, or its id is not a string.
        """
        if not _is_part(part):
            return None
        if part["type"] == _PART:
            if not isinstance(id_ := part.get("id"), str):
                raise ExtError(f"the id of a context must be a string, found {id_!r:.200}")
            return mark(self._contexts.get(id_, _salt(salt)).id)
        if not self._automatic or not isinstance(text := part.get("text"), str):
            return None
        found = self._contexts.find(text, _salt(salt))
        return None if found is None else mark(found.id)


def _is_part(part: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(part, Mapping) and "type" in part


def _texts(content: object) -> list[str]:
    """Returns the texts in the content of a message."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _salt(found: object) -> str | None:
    if found is not None and not isinstance(found, str):
        raise ExtError(
            f"the cache_salt of a prompt with contexts must be a string, found {found!r:.200}"
        )
    return found
