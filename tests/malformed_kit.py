"""Malformed HTTP requests as plain data, for the routes of generation and of the extension."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fuzz_kit import mutate


class Asked(NamedTuple):
    """HTTP request."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]


_JSON = {"Content-Type": "application/json"}
_SAMPLING = {
    "max_new_tokens": 2, "temperature": 0, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "n": 1,
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1,
    "min_new_tokens": 0, "stop": ["x"], "stop_token_ids": [1], "stop_regex": "a+",
    "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "no_stop_trim": False, "stream_interval": 1, "logit_bias": {"5": 1.0}, "sampling_seed": 1,
    "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
    "beam_width": None, "watermark": None, "custom_params": {"a": 1},
}  # fmt: skip
_GENERATE = {
    "text": "Hello there", "input_ids": None, "input_embeds": None, "sampling_params": _SAMPLING,
    "rid": None, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
    "token_ids_logprob": [3], "return_text_in_logprobs": True, "stream": False, "priority": 1,
    "extra_key": "k", "cache_salt": "s", "lora_path": None, "session_params": None,
    "session_id": None, "image_data": None, "return_hidden_states": False,
    "custom_logit_processor": None, "positional_embed_overrides": None, "bootstrap_room": None,
    "bootstrap_port": None, "routed_dp_rank": None, "max_thinking_tokens": None,
    "multi_item_delimiter_indices": None, "token_indices_to_pool": None, "kv_hints": None,
    "return_routed_experts": False, "routed_experts_start_len": 0, "return_indexer_topk": False,
    "return_sampling_mask": None, "return_prompt_token_ids": True, "routing_key": None,
    "return_flat_raw_top_logprobs": False, "external_trace_header": None, "watermark": None,
    "need_wait_for_mm_inputs": None, "encoder_urls": None, "custom_labels": None,
}  # fmt: skip
_MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
_OPENAI = {
    "model": "m", "max_tokens": 2, "temperature": 0, "top_p": 1.0, "n": 1, "stop": ["x"],
    "stop_token_ids": [1], "seed": 1, "frequency_penalty": 0.1, "presence_penalty": 0.1,
    "logit_bias": {"5": 1}, "stream": False, "stream_options": None, "user": "u",
    "min_tokens": 0, "regex": None, "ebnf": None, "min_p": 0.0, "top_k": 5,
    "repetition_penalty": 1.1, "ignore_eos": False, "skip_special_tokens": True, "priority": 1,
    "extra_key": "k", "cache_salt": "s", "rid": None, "custom_params": {"a": 1},
    "response_format": None, "session_params": None, "return_hidden_states": False,
    "lora_path": None, "custom_logit_processor": None, "input_ids": None,
}  # fmt: skip
_PARTS = {
    "text": [{"type": "text", "text": "a"}, {"type": "ext_context", "id": "ctx-none"}, "b"],
    "sampling_params": {"max_new_tokens": 2, "custom_params": {"ext_composition": {}}},
    "cache_salt": "s",
}
_FOLLOWS = {
    "input_ids": [5, 6, 7],
    "sampling_params": {
        "max_new_tokens": 2,
        "custom_params": {"ext_stored": {"id": "stx-none", "sparsity": 0.5}, "ext_recorded": None},
    },
}
_SPLIT = {"by": "tokens", "tokens": 4}
_CREATE = (
    "POST", "/ext/chunks",
    {"chunks": ["Hello there", [5, 6]], "method": "lego-16", "split": _SPLIT, "prefix": "p",
     "ttl": 5.0, "cache_salt": "s"},
)  # fmt: skip
_ROUTES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "/generate", _GENERATE),
    ("POST", "/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}),
    ("POST", "/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": 2}}),
    ("POST", "/generate", _PARTS),
    ("POST", "/generate", _FOLLOWS),
    ("POST", "/v1/completions", {"prompt": "Hello", "logprobs": 2, "echo": False, **_OPENAI}),
    ("POST", "/v1/chat/completions",
     {"messages": _MESSAGES, "tools": None, "tool_choice": "none", "logprobs": True,
      "top_logprobs": 2, "chat_template_kwargs": None, **_OPENAI}),
    ("POST", "/invocations", {"messages": _MESSAGES, "model": "m", "max_tokens": 2}),
    ("POST", "/v1/responses", {"input": "Hello", "model": "m", "max_output_tokens": 16}),
    ("POST", "/v1/messages", {"messages": _MESSAGES, "model": "m", "max_tokens": 2}),
    ("POST", "/v1/messages/count_tokens", {"messages": _MESSAGES, "model": "m"}),
    ("POST", "/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "model": "m",
                           "stream": False, "options": {"num_predict": 2}}),
    ("POST", "/api/generate", {"prompt": "Hi", "model": "m", "stream": False,
                               "options": {"num_predict": 2}}),
    ("POST", "/api/show", {"model": "m"}),
    ("POST", "/v1/embeddings", {"input": "Hello", "model": "m"}),
    ("POST", "/encode", {"text": "Hello"}),
    ("POST", "/classify", {"text": "Hello"}),
    ("POST", "/v1/classify", {"input": "Hello", "model": "m"}),
    ("POST", "/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5], "model": "m"}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/v1/tokenize", {"prompt": "Hello", "model": "m"}),
    ("POST", "/v1/detokenize", {"tokens": [5], "model": "m"}),
    ("POST", "/vertex_generate", {"instances": [{"text": "Hi"}], "parameters": {}}),
    _CREATE,
    ("POST", "/ext/swap/priority", {"rid": "none", "priority": 1}),
    ("POST", "/ext/clusters", {"input_ids": [5, 6, 7], "text": None, "record_only": False}),
    ("POST", "/open_session", {"capacity_of_str_len": 1000, "session_id": "fuzz"}),
    ("POST", "/close_session", {"session_id": "fuzz"}),
    ("POST", "/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "llama3"}),
    ("POST", "/separate_reasoning", {"text": "a", "reasoning_parser": "qwen3"}),
)  # fmt: skip
_READ = (
    "/ext/chunks/list", "/ext/chunks/fidelity", "/ext/chunks/{}", "/ext/chunks/{}/pin",
    "/ext/chunks/{}/unpin",
    "/ext/clusters/list", "/ext/clusters/{}", "/v1/models/{}", "/v1/responses/{}",
    "/server_info", "/model_info", "/v1/loads", "/metrics", "/ext/{}", "/{}",
)  # fmt: skip
PATHS = frozenset((*(path for _, path, _ in _ROUTES), *_READ))
"""Paths of the requests; ``{}`` stands for a random name."""
_NAMES = (
    "ctx-none", "stx-none", "%00", "..%2f..%2fetc%2fpasswd", "a" * 3000, "%ff%fe", "*", "", "%0a",
    "list?cache_salt=%00", "stx-" + "a" * 200,
)  # fmt: skip


class _Deep(NamedTuple):
    """Nested arrays or objects, as the bytes that open and close a level."""

    levels: int
    opening: bytes = b"["
    closing: bytes = b"]"


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -2, 2, 3, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 63, -(1 << 63),
    1 << 64, 10**40, 1e308, -0.0, 0.5, 1e-320, float("nan"), float("inf"), -float("inf"), 49152,
    "", " ", "a", "\x00", "\ue0c0", "\ud800", "ctx-none", "none", "é" * 50, "x" * 5000, "(" * 300,
    "(a+)+$", "[", "\\", "{}", "[]", '{"type": "object"}', '{"type": 5}', '{"$ref": "#/x"}',
    "root ::= ", "root ::= root", "auto", "lego-0", "blend-9999999999", "prime-16", "naive",
    [], [[]], [None], [1], [-1], [1 << 40], [49151, 49152], [[1], []], [[1], [2]], [""], ["", "a"],
    ["a", None], [1, "a"], [1.5], [True], [[[1]]], ["a"] * 40, [[0.5] * 8],
    {}, {"a": 1}, {"": None}, {"-1": 1.0}, {"5": None}, {"999999999": 1}, {"a": "b"}, {"5": 1e400},
    [{}], [{"type": "text"}], [{"type": "text", "text": ""}], [{"type": "ext_context"}],
    [{"type": "ext_context", "id": 5}], [{"type": "image_url", "image_url": {"url": "x"}}],
    [{"role": "user", "content": ""}], [{"role": "user"}], [{"role": 5, "content": None}],
    [{"role": "assistant", "tool_calls": [{}]}], {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}},
    {"type": "structural_tag"}, {"ext_stored": 5}, {"ext_stored": {"id": "stx-x", "sparsity": 9}},
    {"ext_composition": {"chunks": []}}, {"ext_selection": 1}, {"ext_recorded": {"id": "stx-a"}},
    {"ext_marked": True}, {"ext_automatic": {"ctx-a": 5}}, {"by": "paragraph", "tokens": 1},
    {"by": "markdown", "tokens": 0},
    _Deep(250), _Deep(260, b'{"a":', b"}"), _Deep(900), _Deep(900, b'{"a":', b"}"), _Deep(3000),
)  # fmt: skip


def _lethal() -> Iterator[Asked]:
    """Yields requests that end SGLang's scheduler or break its HTTP server, to be rejected."""
    few = {"max_new_tokens": 2}
    sampling: tuple[dict[str, Any], ...] = (
        {"max_new_tokens": "b"}, {"n": 1 << 40}, {"n": 0}, {"temperature": True},
        {"top_k": 1 << 40}, {"min_new_tokens": 2, "max_new_tokens": 4, "stop_token_ids": [1 << 40]},
        {"logit_bias": {"5": 1e308}}, {"logit_bias": {"5": "a"}}, {"repetition_penalty": 1e-320},
        *({"stop_regex": each} for each in ("(", "[", "*", ["("], "(?P<a>", "a{1,9999999999}")),
    )  # fmt: skip
    bodies: tuple[dict[str, Any], ...] = (
        {"text": ""}, {"text": [""]}, {"text": ["a", ""]}, {"text": []}, {"input_ids": []},
        {"input_ids": [[5], []]}, {"input_ids": [49152]}, {"input_ids": [-1]},
        {"input_ids": [[5], [1 << 40]]}, {"text": "a", "rid": []}, {"text": "a", "rid": ""},
        {"text": "", "sampling_params": {**few, "n": 2}},
        {"text": "a", "top_logprobs_num": 1 << 20, "return_logprob": True},
        {"text": "a", "logprob_start_len": -5, "return_logprob": True},
        {"text": "a", "positional_embed_overrides": "a"}, {"text": "a", "session_params": {"a": 1}},
        {"text": "a", "token_indices_to_pool": [99]}, {"input_ids": [5], "priority": 1 << 70},
        {"text": "a", "custom_labels": {"id": "x"}}, {"text": "a", "rid": "HEALTH_CHECK_a"},
        {"text": "a", "positional_embed_overrides": [1, [0]]}, {"input_embeds": [[0.5, 0.5]]},
        {"text": ["a", "b"], "positional_embed_overrides": [None, [[[0.5]], [0]]]},
        {"text": "Once upon a time",
         "sampling_params": {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True,
                             "stop_regex": "([a-zA-Z,. ]+)+@"}},
        *({"text": "a", "sampling_params": {**few, **each}} for each in sampling),
    )  # fmt: skip
    for body in bodies:
        yield Asked("POST", "/generate", encoded({"sampling_params": few, **body}), _JSON)
    for prompt in ("", [], [[]], [""], [49152], [-1], ["a", ""]):
        completion = {"model": "m", "prompt": prompt, "max_tokens": 2}
        yield Asked("POST", "/v1/completions", encoded(completion), _JSON)
    for items, given in (([[7]], [[0.5, 0.5]]), ([[7, 7]], [[0.5, 0.5], [0.5]])):
        score = {"query": [5], "items": items, "label_token_ids": [5], "model": "m"}
        overrides = {"embed_override_token_id": 7, "item_embed_overrides": [given]}
        yield Asked("POST", "/v1/score", encoded({**score, **overrides}), _JSON)
    for route, prompt in (
        ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": _MESSAGES}),
    ):  # fmt: skip
        asked = {"model": "m", "max_tokens": 2, **prompt, "stop_regex": "["}
        yield Asked("POST", route, encoded(asked), _JSON)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values that are nested in ``value``."""
    found: list[tuple[Any, ...]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        found.append((*path, key))
        if isinstance(inner, dict | list):
            found += _places(inner, (*path, key))
    return found


def _put(body: Any, path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        body = body[key]
    body[path[-1]] = value


def _remove(body: Any, path: Sequence[Any]) -> None:
    for key in path[:-1]:
        body = body[key]
    del body[path[-1]]


def spoiled(template: Any, rng: random.Random) -> Any:
    """Returns a copy of ``template`` with up to three of its values replaced or removed."""
    body = copy.deepcopy(template)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not (places := _places(body)):
            break
        place = rng.choice(places)
        if rng.random() < 0.06:
            _remove(body, place)
        else:
            _put(body, place, copy.deepcopy(rng.choice(_VALUES)))
    return body


def malformed(rng: random.Random) -> Asked:
    """Returns a random request whose path, body, headers or method may be invalid."""
    if rng.random() < 0.12:
        path = rng.choice(_READ).format(rng.choice(_NAMES))
        return Asked(rng.choice(("GET", "GET", "DELETE", "POST", "PUT")), path, b"", {})
    # The routes with the most fields are chosen more often.
    method, path, template = rng.choice((*_ROUTES, *_ROUTES[:7], *_ROUTES[:2], _CREATE))
    body = spoiled(template, rng)
    headers = _JSON
    data = encoded(body)
    kind = rng.random()
    if kind < 0.06:
        data = mutate(data, rng)
    elif kind < 0.08:
        data = encoded(rng.choice(_VALUES))
    elif kind < 0.10:
        headers = {"Content-Type": rng.choice(("text/plain", "application/x-www-form-urlencoded"))}
    elif kind < 0.11:
        method = rng.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"))
    return Asked(method, path, data, headers)


def encoded(value: Any) -> bytes:
    """Returns ``value``, which may contain :class:`_Deep`, as JSON."""
    if isinstance(value, _Deep):
        return value.opening * value.levels + b"1" + value.closing * value.levels
    if isinstance(value, dict):
        pairs = (json.dumps(key).encode() + b":" + encoded(each) for key, each in value.items())
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(encoded, value)) + b"]"
    return json.dumps(value).encode()


LETHAL = (*_lethal(),)
