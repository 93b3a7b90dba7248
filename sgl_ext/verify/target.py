"""Server that is verified: its requests, its state, and what empties its caches."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import requests

from sgl_ext.client import refusal, sent, with_scheme
from sgl_ext.errors import ExtError
from sgl_ext.serving.http import wait_until_stored
from sgl_ext.verify.compare import Reply

_DEADLINE_S = 600.0
_LIKELIEST = 4


class Target:
    """Running server at ``url``. Threads may share an instance.

    Args:
        api_key: API key of the server, if it has one.
        admin_api_key: Admin API key of the server, which flushing requires if it has one.

    Every method raises ExtError if the server does not answer or refuses a request.
    """

    def __init__(
        self, url: str, api_key: str | None = None, admin_api_key: str | None = None
    ) -> None:
        self.url = with_scheme(url)
        self._key = api_key
        self._admin_key = admin_api_key or api_key

    def info(self, deadline: float = _DEADLINE_S) -> dict[str, Any]:
        """Returns the server's ``/server_info``, which it must send within ``deadline`` seconds."""
        found = self._json("GET", "/server_info", deadline=deadline)
        if missing := {"internal_states", "max_total_num_tokens", "max_req_input_len"} - {*found}:
            names = ", ".join(sorted(missing))
            raise ExtError(f"{self.url} is not an SGLang server: its /server_info has no {names}")
        return found

    def tokens(self, text: str, *, first: bool = False) -> list[int]:
        """Returns the token ids of a text.

        Args:
            first: True if the text begins a prompt, whose special tokens it then has.
        """
        body = {"model": "default", "prompt": text, "add_special_tokens": first}
        found: list[int] = self._json("POST", "/tokenize", body)["tokens"]
        return found

    def answer(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
        tokens: int,
        *,
        likeliest: bool = False,
        stop: bool = False,
        fields: Mapping[str, Any] | None = None,
        salt: str | None = None,
        priority: int | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Returns the greedy answer to a prompt.

        Args:
            prompt: token ids, or a text or its parts.
            tokens: tokens of the answer.
            likeliest: True to ask for log-probabilities of the likeliest tokens.
            stop: True if the answer may end before ``tokens``.
            fields: further fields of the request, such as ``ext_stored``.
            salt: salt of the tenant that the prompt's KV belongs to.
            priority: priority of the request.
            on_first: called when the first token has come.
        """
        parameters: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": tokens,
            "ignore_eos": not stop,
        }
        ids = not isinstance(prompt, str) and all(isinstance(each, int) for each in prompt)
        body: dict[str, Any] = {
            "input_ids" if ids else "text": prompt, "sampling_params": parameters, "stream": True,
            **(fields or {}),
        }  # fmt: skip
        if likeliest:
            body |= {"return_logprob": True, "top_logprobs_num": _LIKELIEST}
        given = {"cache_salt": salt, "priority": priority}
        body |= {name: value for name, value in given.items() if value is not None}
        whole, seconds = self._whole(body, on_first)
        meta = whole["meta_info"]
        reason = meta["finish_reason"] or {}
        if reason.get("type") not in ("length", "stop"):
            raise ExtError(
                f"{self.url} has not answered: {reason.get('message', 'no reason given')}"
            )
        return Reply(
            text=whole["text"],
            tokens=tuple(whole["output_ids"]),
            likeliest=tuple(
                {token: logprob for logprob, token, *_ in each}
                for each in meta.get("output_top_logprobs") or ()
            ),
            prompt=meta["prompt_tokens"],
            sources=_sources(meta),
            entries=tuple(meta.get("ext") or ()),
            seconds=seconds,
        )

    def logprobs(
        self, prompt: Sequence[int], begin: int, *, salt: str | None = None
    ) -> list[float]:
        """Returns the log-probabilities of a prompt's tokens behind ``begin``.

        These tokens are computed; KV of those before may come from a cache.

        Args:
            salt: salt of the tenant that the prompt's KV belongs to.
        """
        body: dict[str, Any] = {
            "input_ids": [*prompt], "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True, "logprob_start_len": begin,
        }  # fmt: skip
        if salt is not None:
            body["cache_salt"] = salt
        found = self._json("POST", "/generate", body)["meta_info"]["input_token_logprobs"]
        # The first one is that of a token whose logits were not computed. JSON has no NaN.
        found = [math.nan if each[0] is None else float(each[0]) for each in found[1:]]
        if len(found) != (wanted := len(prompt) - begin - 1):
            raise ExtError(
                f"{self.url} returned {len(found)} log-probabilities of a prompt, not {wanted}"
            )
        return found

    def settle(self) -> None:
        """Waits until the tiers have stored all pages that they were given."""
        wait_until_stored(
            self.url, lambda: [each.get("sgl_ext", {}) for each in self.info()["internal_states"]]
        )

    def flush(self) -> None:
        """Empties the caches in device and host memory; fails while the server has requests."""
        # The scheduler may not yet have ended a request that was answered.
        self._ask("POST", "/flush_cache?timeout=30", admin=True)

    def fidelity(self) -> dict[str, Any]:
        """Returns the divergence of linked chunks that the server has measured at its start."""
        return self._json("GET", "/ext/chunks/fidelity")

    def _whole(
        self, body: Mapping[str, Any], on_first: Callable[[], None]
    ) -> tuple[dict[str, Any], float]:
        """Returns a streamed answer as a whole, and the seconds until its first event."""
        began, first, events = time.monotonic(), 0.0, []
        with self._ask("POST", "/generate", body, stream=True) as answer:
            try:
                for line in answer.iter_lines():
                    if line.startswith(b"data: {"):
                        if not first:
                            first = time.monotonic()
                            on_first()
                        events.append(json.loads(line.removeprefix(b"data: ")))
            except (requests.RequestException, ValueError) as error:
                raise ExtError(
                    f"the answer of {self.url}/generate was cut off: {error}; read the server's "
                    "log, and send the request again"
                ) from None
        if not events or "meta_info" not in events[-1]:
            match events[-1:]:
                case [{"error": {"message": said}}]:
                    pass
                case _:
                    said = "the stream ended early"
            raise ExtError(f"{self.url}/generate has not answered: {said}")
        return _joined(events), first - began

    def _json(
        self, verb: str, path: str, body: object = None, *, deadline: float = _DEADLINE_S
    ) -> dict[str, Any]:
        answer = self._ask(verb, path, body, deadline=deadline)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ExtError(f"{self.url}{path} returned no JSON object; check the URL of the server")
        return found

    def _ask(
        self,
        verb: str,
        path: str,
        body: object = None,
        *,
        admin: bool = False,
        stream: bool = False,
        deadline: float = _DEADLINE_S,
    ) -> requests.Response:
        url, key = f"{self.url}{path}", self._admin_key if admin else self._key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = sent(verb, url, json=body, headers=headers, timeout=deadline, stream=stream)
        if answer.status_code == 404 and not path.startswith("/ext"):
            raise ExtError(f"{url} was not found; is an SGLang server running there?")
        if admin and answer.status_code in (401, 403):
            raise ExtError(f"{url} requires the admin API key of the server: give --admin-api-key")
        if not answer.ok:
            raise refusal(url, answer, "chunks")
        return answer


def _joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the last event of a streamed answer with what all events have told.

    With ``--incremental-streaming-output`` an event has only what is new since the one before it.
    """
    last = events[-1]
    if sum(len(each["output_ids"]) for each in events) != last["meta_info"]["completion_tokens"]:
        return last  # each event repeats those before it
    metas = [each["meta_info"] for each in events]
    lists = {
        name: [one for meta in metas for one in meta.get(name) or ()]
        for name in ("output_top_logprobs", "ext")
    }
    return {
        "text": "".join(each["text"] for each in events),
        "output_ids": [token for each in events for token in each["output_ids"]],
        "meta_info": {**last["meta_info"], **lists},
    }


def _sources(meta: Mapping[str, Any]) -> dict[str, int]:
    """Returns the tokens of a prompt by the source of their KV, of those that were not computed."""
    found: dict[str, int] = {}
    linked = 0
    for entry in meta.get("ext") or ():
        match entry:
            case {"power": "tiers", "sources": sources}:
                loaded = {name: each["tokens"] for name, each in sources.items()}
            case {"power": "restore", "loaded": loaded}:
                pass
            case {"power": "chunks"}:
                linked += entry["linked"] + entry["prefix"]
                continue
            case _:
                continue
        for name, tokens in loaded.items():
            found[name] = max(found.get(name, 0), tokens)
    device = meta["cached_tokens"] - sum(found.values()) - linked
    found = {"device": device, **found, "linked": linked}
    return {name: tokens for name, tokens in found.items() if tokens > 0}
