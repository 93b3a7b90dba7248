"""Middleware for contexts in the bodies of SGLang's own routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

from starlette.types import ASGIApp

from sgl_ext.chunks.contexts import Context, Contexts
from sgl_ext.engine.chunks.parameters import AUTOMATIC, MARKED
from sgl_ext.engine.front.bodies import Bodies, object_of
from sgl_ext.engine.front.custom_params import STORED
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
        marks = _Marks(self._contexts, request.get("cache_salt"))
        marks.automatic = self._automatic and not _stays_plain(request)
        messages = request.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                content = message.get("content")
                if isinstance(content, list):
                    message["content"] = [marks.chat_part(part) for part in content]
                else:
                    marks.require_known(content)
        if marks.named:  # SGLang tokenizes a chat before the context service sees it
            _add(request, MARKED, True)
        if (field := _PROMPTS.get(path)) is not None:
            prompt = request.get(field)
            if isinstance(prompt, list) and any(map(_is_part, prompt)):
                request[field] = prompt = "".join(map(marks.text, prompt))
            prompts = prompt if isinstance(prompt, list) else [prompt]
            if request.get("echo") and any(isinstance(one, str) and marked(one) for one in prompts):
                raise ExtError(
                    "echo does not support prompts with contexts, whose texts are not in the "
                    "prompt; omit it"
                )
        if automatic := {id_: marks.texts[id_] for id_ in marks.texts.keys() - marks.named}:
            params = request if path != "/generate" else object_of(request, "sampling_params")
            _add(params, AUTOMATIC, automatic)
            if path == "/generate":
                request["sampling_params"] = params


class _Marks:
    """Marks that replace parts of one request.

    Args:
        contexts: registry of the contexts.
        salt: the request's ``cache_salt``, of any type.

    Attributes:
        automatic: whether a part whose text is that of a context is replaced, too.
        named: ids of the contexts that the request names.
        texts: texts of the contexts that were found by them, by id.
    """

    def __init__(self, contexts: Contexts, salt: object) -> None:
        self._contexts = contexts
        self._salt = salt
        self.automatic = False
        self.named: set[str] = set()
        self.texts: dict[str, str] = {}

    def chat_part(self, part: object) -> object:
        """Returns a part of a message as SGLang reads it."""
        if (mark := self._of(part)) is not None:
            return {"type": "text", "text": mark}
        self.require_known(part.get("text") if isinstance(part, Mapping) else part)
        return part

    def require_known(self, text: object) -> None:
        """Checks the marks that a user has written; SGLang would report another error."""
        for id_ in ids_in(text) if isinstance(text, str) else ():
            self.named.add(self._get(id_).id)

    def text(self, part: object) -> str:
        """Returns the text that a part of a prompt stands for."""
        if (mark := self._of(part)) is not None:
            return mark
        found: object = part
        if _is_part(part) and part["type"] == "text":
            found = part.get("text")
        if not isinstance(found, str):
            raise ExtError(
                "a part of a prompt must be a string, {'type': 'text', 'text': …} or {'type': "
                f"'{_PART}', 'id': …}}, found {part!r:.200}"
            )
        self.named.update(ids_in(found))
        return found

    def _of(self, part: object) -> str | None:
        """Returns the mark that replaces a part; None if the part is not a context.

        Raises:
            ExtError: the context does not exist, or its id is not a string.
        """
        if not _is_part(part):
            return None
        if part["type"] == _PART:
            if not isinstance(id_ := part.get("id"), str):
                raise ExtError(f"the id of a context must be a string, found {id_!r:.200}")
            self.named.add(self._get(id_).id)
            return mark(id_)
        text = part.get("text")
        if not self.automatic or not isinstance(text, str):
            return None
        if (found := self._contexts.find(text, _salt(self._salt))) is None:
            return None
        self.texts[found.id] = text
        return mark(found.id)

    def _get(self, id_: str) -> Context:
        return self._contexts.get(id_, _salt(self._salt))


def _stays_plain(request: Mapping[str, Any]) -> bool:
    """Returns whether a request has fields of a type or with a value that contexts do not support.

    If it names no context, it is then served without any.
    """
    places = [request]
    for name in ("custom_params", "sampling_params"):
        places.append(found := request.get(name) or {})
        if not isinstance(found, dict):
            return True
    places.append(custom := places[-1].get("custom_params") or {})
    return (
        not isinstance(custom, dict)
        or not isinstance(request.get("cache_salt"), str | None)
        or any(request.get(each) for each in ("input_ids", "echo", "continue_final_message"))
        or any(each.get(STORED) is not None for each in places)
    )


def _add(params: dict[str, Any], name: str, value: object) -> None:
    """Adds a key to the ``custom_params`` in ``params``."""
    params["custom_params"] = {**object_of(params, "custom_params"), name: value}


def _is_part(part: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(part, Mapping) and "type" in part


def _salt(found: object) -> str | None:
    if found is not None and not isinstance(found, str):
        raise ExtError(
            f"the cache_salt of a prompt with contexts must be a string, found {found!r:.200}"
        )
    return found
