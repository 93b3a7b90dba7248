"""What a running server takes to come next, asked of its ``/generate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import requests

from sgl_ext.chunks.divergence import Distribution
from sgl_ext.errors import ExtError


class Told(NamedTuple):
    """A server's answer."""

    distributions: list[Distribution]
    """Of each token asked for."""
    meta: Mapping[str, Any]
    """The answer's ``meta_info``."""


def request(
    prompt: str | Sequence[int], begin: int, *, top: int, salt: str | None = None
) -> dict[str, Any]:
    """What ``/generate`` is asked for the distributions that a prompt's tokens are drawn from.

    Args:
        begin: position of the first of these tokens.
        top: tokens of each distribution.
    """
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        # The logprob of a token is told with the one before it.
        "logprob_start_len": begin - 1,
        "top_logprobs_num": top,
        "cache_salt": salt,
    }


def read(meta: Mapping[str, Any], last: int) -> list[Distribution]:
    """The distributions of the last tokens of a prompt, in an answer's ``meta_info``.

    Raises:
        ExtError: it tells of fewer tokens.
    """
    tops = [found for found in meta["input_top_logprobs"] if found is not None][-last:]
    if len(tops) < last:
        raise ExtError(f"the server told of {len(tops)} tokens, not of {last}")
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
    """Distributions that the last tokens of a prompt are drawn from, by the server at ``url``.

    Args:
        last: how many tokens.
        begin: position of the first of them.
        top: tokens of each distribution.
        deadline: seconds.

    Raises:
        ExtError: the server does not answer, refuses, or tells of fewer tokens.
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
        raise ExtError(f"{url} did not say what comes next: {error}") from None
    meta: dict[str, Any] = answer.json()["meta_info"]
    return Told(read(meta, last), meta)
