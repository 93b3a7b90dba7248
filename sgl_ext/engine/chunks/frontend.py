"""Contexts in programs of SGLang's frontend language. The import of this module enables them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from sglang.lang.ir import SglExpr

from sgl_ext.client import ContextCache
from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.hooks import Original
from sgl_ext.errors import ExtError, UnknownContextError
from sgl_ext.marks import mark

_ID = re.compile(r"ctx-[\w-]+")
_MOST = 10_000
"""Maximum number of texts of each backend whose contexts are remembered."""


class Chunk(SglExpr):
    """Expression of a chunk in a program; see :func:`sgl_ext.lang.chunk`.

    It is not an ``SglConstantText``: SGLang begins a batch with a request for the constant text
    that all of its programs begin with, and that request must not end in a chunk.
    """

    def __init__(self, text_or_id: str, method: str | None) -> None:
        super().__init__()
        if not isinstance(text_or_id, str):
            raise TypeError(f"a chunk must be a text or the id of a context, found {text_or_id!r}")
        if not text_or_id:
            raise ExtError("a chunk cannot be empty; give a text, or the id of a context")
        self.is_id = _ID.fullmatch(text_or_id) is not None
        if self.is_id and method is not None:
            raise ExtError(f"{text_or_id} is already prepared for a link method; omit {method!r}")
        self.content, self.method = text_or_id, method

    def __repr__(self) -> str:
        return f"Chunk({self.content!r})"

    def __format__(self, _: str) -> str:
        raise TypeError(
            "a chunk cannot be formatted into an f-string; concatenate it with texts by +"
        )


@dataclass
class _Remembered:
    lock: Lock = field(default_factory=Lock)
    id: str | None = None


class _Texts:
    """Contexts of texts on the server of one backend."""

    def __init__(self, backend: Any) -> None:
        verify = True if backend.verify is None else backend.verify
        self._cache = ContextCache(backend.base_url, backend.api_key, verify=verify)
        self._remembered: dict[tuple[str, str | None], _Remembered] = {}
        self._lock = Lock()

    def id_of(self, chunk: Chunk) -> str:
        key = chunk.content, chunk.method
        with self._lock:
            # Ordered by last use; the least recently used entry is dropped.
            entry = self._remembered.pop(key, None) or _Remembered()
            self._remembered[key] = entry
            if len(self._remembered) > _MOST:
                del self._remembered[next(iter(self._remembered))]
        before = entry.id
        if before is not None and self._is_there(before):
            return before
        with entry.lock:
            if entry.id is None or entry.id == before:
                (context,) = self._cache.create(chunk.content, method=chunk.method)
                entry.id = context.id
            return entry.id

    def _is_there(self, id_: str) -> bool:
        try:
            self._cache.get(id_)  # also marks the context as used on the server
        except UnknownContextError:
            return False
        return True


_backends: WeakKeyDictionary[object, _Texts] = WeakKeyDictionary()
_backends_lock = Lock()


def _texts_of(backend: Any) -> _Texts:
    if not hasattr(backend, "base_url"):
        raise ExtError(
            "a text can become a chunk only on a RuntimeEndpoint, but the program runs on "
            f"{type(backend).__name__}; create a context and give its id"
        )
    with _backends_lock:
        if backend not in _backends:
            _backends[backend] = _Texts(backend)
        return _backends[backend]


def _execute(original: Original, executor: Any, expression: object) -> object:
    if not isinstance(expression, Chunk):
        return original(executor, expression)
    is_id, content = expression.is_id, expression.content
    id_ = content if is_id else _texts_of(executor.backend).id_of(expression)
    return original(executor, mark(id_))


HOOKS = (
    hooks.Hook(
        "sglang.lang.interpreter.StreamExecutor._execute",
        "around",
        _execute,
        "the server that a text is sent to is known only where the program runs, and SGLang does "
        "not pass the executor to expressions",
    ),
)

# Applied at import rather than in a function: programs run in threads, and a module is imported
# only once.
hooks.apply(HOOKS)
