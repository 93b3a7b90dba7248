"""HTTP requests to a running server: prompts, its state, and flushes of its KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import requests

from sgl_ext.errors import ExtError

_DEADLINE_S = 600.0


def generate(
    url: str, prompt: str | Sequence[int], tokens: int, stop: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Returns the text that a server generates greedily, and the ``meta_info`` of the answer.

    Args:
        prompt: text or token ids.
        tokens: maximum tokens of the answer.
        stop: text before which the answer ends; None for none.

    Raises:
        ExtError: the server does not answer, or it refuses the request.
    """
    found = send(url, prompt, {"temperature": 0, "max_new_tokens": tokens, "stop": stop})
    return found["text"], found["meta_info"]


def send(url: str, prompt: str | Sequence[int], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of a server's ``/generate``.

    Args:
        prompt: text or token ids.
        parameters: ``sampling_params``.

    Raises:
        ExtError: the server does not answer, or it refuses the request.
    """
    body = {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": parameters,
    }
    found: dict[str, Any] = _answer("POST", f"{url}/generate", body, checked=True).json()
    return found


def wait_until_stored(
    url: str, states: Callable[[], Iterable[Mapping[str, Any]]] | None = None
) -> None:
    """Waits until the server's tiers have stored all pages that they were given.

    Args:
        states: returns the states of the server's schedulers, if they need an API key to read.

    Raises:
        ExtError: they still store pages at the deadline.
    """
    give_up = time.monotonic() + _DEADLINE_S
    states = states or (lambda: _states(url))
    quiet = 0
    while time.monotonic() < give_up:
        tiers = [tier for each in states() for tier in each.get("tiers", {}).values()]
        storing = any(tier["queue_depth"] for tier in tiers)
        quiet = 0 if storing else quiet + 1
        if quiet == 3:
            return
        time.sleep(0.05)
    raise ExtError(
        f"{url} still stores pages after {_DEADLINE_S:g} s; check the failures of its tiers in "
        "/metrics"
    )


def forget(url: str) -> None:
    """Flushes the KV in device and host memory; KV on SSDs stays.

    Raises:
        ExtError: the server is busy for too long, or does not answer.
    """
    give_up = time.monotonic() + _DEADLINE_S
    while time.monotonic() < give_up:
        # The scheduler may not have ended a request that was answered.
        if _answer("POST", f"{url}/flush_cache").ok:
            return
        time.sleep(0.05)
    raise ExtError(
        f"{url} did not flush its KV within {_DEADLINE_S:g} s; wait until its requests have ended"
    )


def live(url: str) -> dict[str, Any]:
    """Returns the state of the extension in a server's first scheduler; empty for stock SGLang.

    Raises:
        ExtError: the server does not answer.
    """
    return _states(url)[0]


def _states(url: str) -> list[dict[str, Any]]:
    """Returns the state of the extension in each scheduler."""
    found = _answer("GET", f"{url}/server_info").json()
    return [each.get("sgl_ext", {}) for each in found["internal_states"]]


def model_info(url: str) -> dict[str, Any]:
    """Returns what a running server reports of its model.

    Raises:
        ExtError: the server does not answer.
    """
    found: dict[str, Any] = _answer("GET", f"{url}/get_model_info").json()
    return found


def _answer(
    verb: str, url: str, body: object = None, *, checked: bool = False
) -> requests.Response:
    """Returns the answer to a request; if ``checked``, an error status raises ExtError, too."""
    try:
        answer = requests.request(verb, url, json=body, timeout=_DEADLINE_S)
        if checked:
            answer.raise_for_status()
    except requests.RequestException as error:
        raise ExtError(f"no answer from {url}: {error}; read the log of the server") from None
    return answer
