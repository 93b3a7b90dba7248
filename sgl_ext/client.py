"""Contexts of a running server: create, look at, delete, and name them in chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import requests

from sgl_ext.chunks.contexts import UnknownContextError
from sgl_ext.errors import ExtError

_LONGEST_ECHO = 1000

T = TypeVar("T")


class ContextInfo(msgspec.Struct, frozen=True):
    """What a server says of a context."""

    id: str
    tokens: int
    bytes: int
    """Of its KV."""
    method: str
    """Name of the link method that it is prepared for."""
    expires_in: float | None
    """Seconds, when this was asked; None if never."""


class _Listed(msgspec.Struct):
    contexts: tuple[ContextInfo, ...]


def part(context: str | ContextInfo) -> dict[str, str]:
    """What names a context among the parts of a chat message's ``content``, or of the ``text`` of
    ``/generate``."""
    id_ = context if isinstance(context, str) else context.id
    return {"type": "ext_context", "id": id_}


class ContextCache:
    """The context cache of the server at ``url``.

    Every call is one request; threads may share an instance.

    Args:
        api_key: the server's, if it has one.
        cache_salt: whose contexts these are; requests that name them must send the same one.
        timeout: seconds without an answer; KV is computed before :meth:`create` returns.
        verify: whether to check the certificate of an https server; or a file of certificates.

    Raises:
        UnknownContextError: the server has no such context, or not any more.
        ExtError: there is no answer, or the server refuses; with what it says.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        cache_salt: str | None = None,
        timeout: float = 600.0,
        *,
        verify: bool | str = True,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        self._timeout = timeout
        self._verify = verify

    def create(
        self,
        chunks: str | Sequence[str | Sequence[int]],
        method: str | None = None,
        prefix: str | None = None,
        ttl: float | None = None,
        split: Mapping[str, Any] | None = None,
    ) -> tuple[ContextInfo, ...]:
        """Computes the KV of chunks, each a text or token ids, and names them in this order.

        Args:
            chunks: a text by itself is one chunk.
            method: name of the link method; the server's default without it.
            prefix: what prompts that link them begin with, such as the system prompt.
            ttl: seconds until they expire; never without it.
            split: how each chunk is first split, such as ``{"by": "markdown", "tokens": 512}``,
                see :class:`sgl_ext.chunks.split.Split`; there is a context of each part then.
        """
        given = {"method": method, "prefix": prefix, "ttl": ttl, "split": split}
        body = {name: value for name, value in given.items() if value is not None}
        parts = [chunks] if isinstance(chunks, str) else list(chunks)
        return self._ask("POST", "", _Listed, json={"chunks": parts, **body, **self._salt}).contexts

    def get(self, id_: str) -> ContextInfo:
        """A context, which counts as used."""
        return self._ask("GET", f"/{quote(id_, safe='')}", ContextInfo, params=self._salt)

    def list(self) -> tuple[ContextInfo, ...]:
        """All of them, the least recently used first."""
        return self._ask("GET", "/list", _Listed, params=self._salt).contexts

    def delete(self, id_: str) -> None:
        """Forgets a context; requests that link it already go on."""
        self._ask("DELETE", f"/{quote(id_, safe='')}", dict[str, str], params=self._salt)

    def _ask(self, verb: str, path: str, type_: type[T], **content: Any) -> T:
        url = f"{self.url}/ext/context_cache{path}"
        try:
            answer = requests.request(
                verb,
                url,
                headers=self._headers,
                timeout=self._timeout,
                verify=self._verify,
                **content,
            )
        except requests.RequestException as error:
            raise ExtError(f"no answer from {url}: {error}; is a server running there?") from None
        if not answer.ok:
            raise _error(url, answer)
        try:
            return msgspec.json.decode(answer.content, type=type_)
        except msgspec.DecodeError as error:
            raise ExtError(f"{url} gave no answer of a context cache: {error}") from None


def _error(url: str, answer: requests.Response) -> ExtError:
    try:
        body = answer.json()
    except ValueError:
        body = None
    match body:
        case {"error": {"message": str(message)}}:  # ours
            return (UnknownContextError if answer.status_code == 404 else ExtError)(message)
        # SGLang's keys, SGLang's routes, FastAPI
        case {"error": found} | {"message": found} | {"detail": found}:
            pass
        case _:
            found = answer.text
    if answer.status_code == 404:
        return ExtError(
            f"{url} is not there: start that server with --enable-ext and a chunks section in its "
            "--ext-config"
        )
    return ExtError(f"{url} answered {answer.status_code}: {str(found)[:_LONGEST_ECHO]}")
