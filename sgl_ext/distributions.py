"""Next-token distributions of a running server, from its ``/generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import requests

from sgl_ext.chunks.divergence import Distribution
from sgl_ext.errors import ExtError


class Told(NamedTuple):
    """Distributions in a server's answer."""

    distributions: list[Distribution]
    """Distribution of each requested token."""
    meta: Mapping[str, Any]
    """``meta_info`` of the answer."""


def request(
    prompt: str | Sequence[int], begin: int, *, top: int, salt: str | None = None
) -> dict[str, Any]:
    """Returns the body of a ``/generate`` request for the distributions of a prompt's tokens.

    Args:
        prompt: Text or token ids.
        begin: Position of the first token whose distribution is requested.
        top: Number of most likely tokens in each distribution.
        salt: ``cache_salt`` of the request.
    """
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        # SGLang reports the logprob of a token at the position before it.
        "logprob_start_len": begin - 1,
        "top_logprobs_num": top,
        "cache_salt": salt,
    }


def read(meta: Mapping[str, Any], last: int) -> list[Distribution]:
    """Returns the distributions of the ``last`` tokens of a prompt from an answer's ``meta_info``.

    Raises:
        ExtError: The answer has distributions of fewer tokens.
    """
    tops = [found for found in meta["input_top_logprobs"] if found is not None][-last:]
    if len(tops) < last:
        raise ExtError(
            f"the server returned distributions of {len(tops)} tokens, expected {last}; request "
            "them from an earlier position"
        )
    return [{token: logprob for logprob, token, _ in found} for found in tops]


def distributions(
    url: str,
    prompt: str | Sequence[int],
    last: int,
    begin: int,
    *,
    top: int,
    deadline: float,
    salt: str | None = None,
    headers: Mapping[str, str] | None = None,
    verify: bool | str = True,
) -> Told:
    """Requests the distributions of the last tokens of a prompt from the server at ``url``.

    Args:
        prompt: Text or token ids.
        last: Number of tokens.
        begin: Position of the first of them.
        top: Number of most likely tokens in each distribution.
        deadline: Timeout of the HTTP request, in seconds.
        salt: ``cache_salt`` of the request.

    Raises:
        ExtError: The server does not answer, refuses, or reports fewer tokens.
    """
    try:
        answer = requests.post(
            f"{url}/generate",
            json=request(prompt, begin, top=top, salt=salt),
            headers=headers,
            verify=verify,
            timeout=deadline,
        )
        answer.raise_for_status()
    except requests.RequestException as error:
        raise ExtError(
            f"cannot get next-token distributions from {url}: {error}; is a server running there?"
        ) from None
    meta: dict[str, Any] = answer.json()["meta_info"]
    return Told(read(meta, last), meta)
