"""Client of the stored contexts of a running server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import requests

from sgl_ext.client import refusal, result_of, sent, with_scheme
from sgl_ext.errors import ExtError

_CONNECT_S = 10.0
_SILENCE_S = 3600.0
"""Longest time between two events, in seconds: the server's own deadline for a context."""


class StoredContexts:
    """Client of the contexts that the server at ``url`` stores on devices, section ``clusters``.

    Args:
        api_key: API key of the server, if it has one; its admin API key if it has that.
        cache_salt: Salt of the tenant. Requests that use its contexts must send the same one.

    Every method raises ExtError if the server does not answer or refuses, with its reason;
    :class:`~sgl_ext.errors.UnknownContextError` for a context that it does not have.
    """

    def __init__(self, url: str, api_key: str | None = None, cache_salt: str | None = None) -> None:
        self._route = f"{with_scheme(url)}/ext/clusters"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}

    def store(
        self,
        context: str | Sequence[int],
        *,
        base: str | None = None,
        tell: Callable[[str], None] = lambda _progress: None,
    ) -> dict[str, Any]:
        """Has the server store a context, and returns its description.

        Args:
            context: its text, or its token ids.
            base: id of the stored context that this one continues, if any.
            tell: called with the progress: ``waiting``, ``computing 4096/65536`` (tokens),
                ``layer 3/30``.
        """
        body: dict[str, Any] = {"stream": True, **self._salt}
        if isinstance(context, str):
            body["text"] = context
        else:
            body["input_ids"] = [*context]
        if base is not None:
            body["base"] = base
        with self._ask("POST", "", json=body, stream=True) as answer:
            return result_of(answer, tell)

    def list(self) -> dict[str, Any]:
        """Returns the answer of ``GET /ext/clusters/list``."""
        answer = self._ask("GET", "/list", params=self._salt)
        try:
            found: dict[str, Any] = answer.json()
        except ValueError:
            found = {}
        if not {"contexts", "storing", "unreadable", "damaged"} <= {*found}:
            raise ExtError(f"{answer.url} did not come from an sgl_ext server; check the URL")
        return found

    def delete(self, id_: str) -> None:
        """Deletes a context; requests that use it run to their end."""
        self._ask("DELETE", f"/{quote(id_, safe='')}", params=self._salt)

    def _ask(self, verb: str, path: str, **content: Any) -> requests.Response:
        url = self._route + path
        timeout = (_CONNECT_S, _SILENCE_S)
        answer = sent(verb, url, headers=self._headers, timeout=timeout, **content)
        if not answer.ok:
            raise refusal(url, answer, "clusters")
        return answer
