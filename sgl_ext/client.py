"""Client of the context cache of a running server."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import requests

from sgl_ext.decoding import decode
from sgl_ext.errors import ExtError, UnknownContextError

_LONGEST_ECHO = 1000
T = TypeVar("T")


class ContextInfo(msgspec.Struct, frozen=True):
    """Description of a context, as a server reports it."""

    id: str
    tokens: int
    bytes: int
    """Size of the context's KV, in bytes."""
    method: str
    """Name of the link method that the context is prepared for."""
    expires_in: float | None
    """Seconds until the context expires, as of the answer; None if it never expires."""
    pinned: bool = False
    """True if the server keeps the context when it has more contexts than its limit."""


class _Listed(msgspec.Struct):
    contexts: tuple[ContextInfo, ...]


class _Warned(msgspec.Struct):
    """Warning of the server that an answer may contain."""

    warning: str | None = None


def with_scheme(url: str) -> str:
    """Returns the URL of a server, with ``http://`` if it names no scheme.

    A final slash is removed, and the ``/v1`` that the URL of an OpenAI client ends with.
    """
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def part(context: str | ContextInfo) -> dict[str, str]:
    """Returns the part that names a context in a prompt.

    It goes among the parts of a chat message's ``content``, of the ``text`` of ``/generate``, or of
    the ``prompt`` of ``/v1/completions``.
    """
    id_ = context if isinstance(context, str) else context.id
    return {"type": "ext_context", "id": id_}


class ContextCache:
    """Client of the context cache of the server at ``url``.

    Every call sends one HTTP request. Threads may share an instance. Warnings of the server, for
    example that its memory cannot hold all contexts, are issued as ``UserWarning``.

    Args:
        api_key: API key of the server, if it has one.
        cache_salt: Salt of the tenant. Requests that name its contexts must send the same one.
        timeout: Seconds to wait for the server. :meth:`create` waits until the KV is computed.
        verify: Whether to check the certificate of an https server, or a file of certificates.

    Raises:
        UnknownContextError: The server does not have the context, or no longer has it.
        ExtError: The server does not answer, or it refuses; the message includes its reason.
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
        self.url = with_scheme(url)
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
        tell: Callable[[str], None] | None = None,
    ) -> tuple[ContextInfo, ...]:
        """Computes the KV of chunks and returns their contexts, in the order of the chunks.

        Args:
            chunks: Chunks, each a text or token ids. A single text is one chunk.
            method: Name of the link method; if None, the server's default.
            prefix: Prefix shared by the prompts that will link the contexts, such as the system
                prompt.
            ttl: Seconds until the contexts expire; if None, they never expire.
            split: How each chunk is split first, such as ``{"by": "markdown", "tokens": 512}``,
                see :class:`sgl_ext.chunks.split.Split`. Each part then becomes a context.
            tell: Called with the progress, such as ``3/20`` chunks, while they are computed.
        """
        given = {"method": method, "prefix": prefix, "ttl": ttl, "split": split}
        body = {name: value for name, value in given.items() if value is not None}
        parts = [chunks] if isinstance(chunks, str) else list(chunks)
        content = {"chunks": parts, **body, **self._salt}
        if tell is None:
            return self._ask("POST", "", _Listed, json=content).contexts
        with self._request("POST", "", json={**content, "stream": True}, stream=True) as answer:
            found = result_of(answer, tell)
        _warn(msgspec.convert(found, _Warned))
        return msgspec.convert(found, _Listed).contexts

    def get(self, id_: str) -> ContextInfo:
        """Returns a context and marks it as used."""
        return self._ask("GET", f"/{quote(id_, safe='')}", ContextInfo, params=self._salt)

    def list(self) -> tuple[ContextInfo, ...]:
        """Returns all contexts of the tenant, the least recently used first."""
        return self._ask("GET", "/list", _Listed, params=self._salt).contexts

    def delete(self, id_: str) -> None:
        """Deletes a context; requests that already link it continue."""
        self._ask("DELETE", f"/{quote(id_, safe='')}", dict[str, str], params=self._salt)

    def pin(self, id_: str) -> ContextInfo:
        """Pins a context: the server does not drop it when it has more contexts than its limit.

        The server computes the KV of the context in the background if it was evicted.
        """
        return self._ask("POST", f"/{quote(id_, safe='')}/pin", ContextInfo, params=self._salt)

    def unpin(self, id_: str) -> ContextInfo:
        """Unpins a context, which the server may then drop again."""
        return self._ask("POST", f"/{quote(id_, safe='')}/unpin", ContextInfo, params=self._salt)

    def _ask(self, verb: str, path: str, type_: type[T], **content: Any) -> T:
        answer = self._request(verb, path, **content)
        try:
            _warn(decode(answer.content, _Warned))
            return decode(answer.content, type_)
        except msgspec.DecodeError as error:
            raise ExtError(
                f"{answer.url} returned an answer that is not a context-cache response: {error}; "
                "check the URL of the server"
            ) from None

    def _request(self, verb: str, path: str, **content: Any) -> requests.Response:
        url = f"{self.url}/ext/chunks{path}"
        answer = sent(
            verb, url, headers=self._headers, timeout=self._timeout, verify=self._verify, **content
        )
        if not answer.ok:
            raise refusal(url, answer, "chunks")
        return answer


def _warn(answer: _Warned) -> None:
    if answer.warning is not None:
        warnings.warn(answer.warning, stacklevel=4)


def sent(
    verb: str, url: str, *, timeout: float | tuple[float, float], **request: Any
) -> requests.Response:
    """Returns the answer to a request, whose arguments are those of ``requests.request``.

    Raises:
        ExtError: there is no answer.
    """
    try:
        return requests.request(verb, url, timeout=timeout, **request)
    except requests.exceptions.SSLError as error:
        raise ExtError(
            f"no answer from {url}: {error}; set REQUESTS_CA_BUNDLE to a file with the certificate "
            "that the server's is signed with, or use http:// if it has none"
        ) from None
    except requests.RequestException as error:
        plain = ", and not with https" if url.startswith("http:") else ""
        raise ExtError(
            f"no answer from {url}: {error}; is a server running there{plain}?"
        ) from None


def result_of(answer: requests.Response, tell: Callable[[str], None]) -> dict[str, Any]:
    """Reads the server-sent events of long work; returns its result.

    Args:
        tell: Called with each progress.

    Raises:
        UnknownContextError: The work needs a context that the server does not have.
        ExtError: The work has failed, or the server has ended the answer early.
    """
    try:
        for line in answer.iter_lines():
            if not line.startswith(b"data: "):
                continue
            found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            if refused := found.get("error"):
                gone = refused.get("code") == UnknownContextError.status
                raise (UnknownContextError if gone else ExtError)(refused["message"])
            if (progress := found.get("progress")) is None:
                return found
            tell(progress)
    except requests.RequestException as error:
        raise ExtError(
            f"the answer of {answer.url} was cut off: {error}; read the server's log, and send the "
            "request again"
        ) from None
    raise ExtError(f"{answer.url} ended its answer early; see the server's log")


def refusal(url: str, answer: requests.Response, section: str) -> ExtError:
    """Returns the error of an answer whose status is one.

    Args:
        section: section of the configuration that the route belongs to.
    """
    try:
        body = answer.json()
    except ValueError:
        body = None
    match body:
        case {"error": {"message": str(message)}}:  # an error of this package
            return (UnknownContextError if answer.status_code == 404 else ExtError)(message)
        # Formats of SGLang's check of API keys, of SGLang's routes, and of FastAPI.
        case {"error": found} | {"message": found} | {"detail": found}:
            pass
        case _:
            found = answer.text
    if answer.status_code in (401, 403):
        return ExtError(
            f"{url} answered {answer.status_code}: {str(found)[:_LONGEST_ECHO]}; give the server's "
            "API key, or its admin API key if it has one"
        )
    if answer.status_code == 404:
        return ExtError(
            f"{url} was not found; start the server with --enable-ext and a {section} section in "
            "its --ext-config"
        )
    return ExtError(f"{url} answered {answer.status_code}: {str(found)[:_LONGEST_ECHO]}")
