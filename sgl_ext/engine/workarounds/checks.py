"""Checks of requests that SGLang's front end accepts and its scheduler cannot decode or compute.

Such requests have prompts without tokens, ids without an embedding, or numbers that overflow a
tensor. An exception in the scheduler ends the server.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec

from sgl_ext.engine.core.sglang_types import GenerateReqInput, SamplingParams, TokenizedReqInput

_ANSWERS = 1 << 10
"""Maximum number of answers to one prompt (``n``)."""
_PROMPTS = 1 << 16
"""Maximum number of prompts of a request, with each answer counted."""
_LOGPROBS = 1 << 23
"""Maximum number of log probabilities of one answer."""
_LARGEST_INT = (1 << 31) - 1
"""Largest sampling parameter that fits into SGLang's tensors of int32."""
_LARGEST_BIAS = 1e30
_SCHEMA_LEVELS = 64
"""Maximum depth of a JSON schema. The time to compile a schema grows with about the cube of it."""
_STRINGS, _BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"'), re.compile(r"[\[\]{}]")
"""Patterns of the string literals and brackets in a JSON text."""
_LEAST_PENALTY = 1e-5
"""Minimum repetition penalty; logits are divided by it in float32."""
NO_TOKENS = "the prompt has no tokens; give a text, or token ids, of at least one token"
_INTEGERS = ("top_k", "min_new_tokens", "stream_interval", "beam_width", "n")
MALFORMED = (
    TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, AssertionError,
    re.error, msgspec.MsgspecError,
)  # fmt: skip
"""Exceptions that SGLang's front end raises for values of unexpected types."""


@contextmanager
def malformed_is_refused(what: str) -> Iterator[None]:
    """Turns :data:`MALFORMED` errors into ValueError.

    SGLang's routes answer a ValueError with 400, and the other errors with 500.
    """
    try:
        yield
    except MALFORMED as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(
            f"{what} cannot be read ({type(error).__name__}: {error!s:.300}); compare the types of "
            "its fields with SGLang's documentation"
        ) from None


def check_size(sampling_params: object, prompts: int) -> None:
    """Checks the number of answers that a request asks for.

    Args:
        sampling_params: one object for all prompts, or a list of one object for each prompt.
        prompts: number of prompts of the request.

    Raises:
        ValueError: ``sampling_params`` or ``n`` is invalid, or there are too many answers.
    """
    if isinstance(sampling_params, list):
        if len(sampling_params) != prompts:
            raise ValueError(
                f"sampling_params must be one object, or a list of {prompts}, one for each "
                f"prompt; found a list of {len(sampling_params)}"
            )
        each = sampling_params
    else:
        each = [sampling_params or {}]
    for params in each:
        if not isinstance(params, Mapping):
            raise ValueError(f"sampling_params must be an object, found {params!r:.200}")
        n = params.get("n", 1)
        if type(n) is not int or not 1 <= n <= _ANSWERS:
            raise ValueError(f"n must be an integer from 1 to {_ANSWERS}, found {n!r:.200}")
        if n * prompts > _PROMPTS:
            raise ValueError(
                f"{prompts} prompts with n={n} request {n * prompts} answers; request at most "
                f"{_PROMPTS} at once"
            )


def check_types(sampling_params: Mapping[str, object], fields: Mapping[str, object]) -> None:
    """Checks the types of sampling parameters that a scheduler would fail to decode.

    Args:
        fields: type of each field by name.

    Raises:
        ValueError: a field has another type; the message names the first one.
    """
    for name, value in sampling_params.items():
        if value is None or name not in fields:
            continue
        try:
            msgspec.convert(value, fields[name])
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"sampling_params.{name}: {error}") from None


@cache
def sampling_fields(class_: type) -> dict[str, object]:
    """Returns the types of the ``SamplingParams`` that SGLang's scheduler decodes, by field."""
    fields = {field.name: field.type for field in msgspec.structs.fields(class_)}
    # SGLang converts stop_token_ids with int(); custom_params hold values of this package, too.
    del fields["stop_token_ids"], fields["custom_params"]
    return fields


def check_tokens(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """Checks that token ids are in the vocabulary.

    Raises:
        ValueError: an id is outside of it; the message names the first one.
    """
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    wrong = next(token for token in ids if not 0 <= token < vocabulary)
    raise ValueError(
        f"{name} contain the token id {wrong}; expected ids from 0 to {vocabulary - 1}"
    )


def check_sampling(params: SamplingParams, vocabulary: int) -> None:
    """Checks the values of SGLang's ``SamplingParams`` that overflow, or make logits NaN.

    Raises:
        ValueError: names the field, the value that was found and possible values.
    """
    check_tokens("stop_token_ids", list(params.stop_token_ids or ()), vocabulary)
    for name in ("json_schema", "structural_tag"):
        check_levels(name, getattr(params, name))
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= _LARGEST_BIAS:
            raise ValueError(
                f"logit_bias of token {token} is {bias}; expected a magnitude of at most "
                f"{_LARGEST_BIAS:g}"
            )
    for name in _INTEGERS:
        if (value := getattr(params, name)) is not None and not 0 <= value <= _LARGEST_INT:
            raise ValueError(f"{name} is {value}; expected 0 to {_LARGEST_INT}")
    if not params.repetition_penalty >= _LEAST_PENALTY:
        raise ValueError(
            f"repetition_penalty is {params.repetition_penalty}; expected at least "
            f"{_LEAST_PENALTY:g}"
        )


def check_levels(name: str, text: str | None) -> None:
    """Raises ValueError if a JSON text is too deep for a grammar to be compiled from it."""
    level = deepest = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text or "")):
        level += 1 if bracket in "[{" else -1
        deepest = max(deepest, level)
    if deepest > _SCHEMA_LEVELS:
        raise ValueError(
            f"{name} is nested {deepest} levels deep; expected at most {_SCHEMA_LEVELS} levels"
        )


def check_logprobs(request: TokenizedReqInput, vocabulary: int, context: int) -> None:
    """Checks the log probabilities that SGLang's ``TokenizedGenerateReqInput`` asks for.

    Args:
        context: maximum number of tokens of a sequence.

    Raises:
        ValueError: names the field, the value that was found and possible values.
    """
    start, most = request.logprob_start_len, request.top_logprobs_num
    tokens = len(request.input_ids or ())
    if request.session_params is not None:
        tokens = max(tokens, start)  # the scheduler knows the earlier turns, and checks it
    # If one request of a batch asks for log probabilities, they are computed for all of them.
    if not 0 <= most <= vocabulary:
        raise ValueError(f"top_logprobs_num is {most}; expected 0 to {vocabulary}")
    if not request.return_logprob:
        return
    if start < -1 or start > tokens:
        raise ValueError(
            f"logprob_start_len is {start}; expected 0 to {tokens}, the tokens of the prompt, or "
            "-1 for the logprobs of the answer only"
        )
    new = request.sampling_params.max_new_tokens
    new = context - tokens if new is None else min(new, context - tokens)
    positions = new + (tokens - start if start >= 0 else 0)
    each = most + len(request.token_ids_logprob or ())
    if each * positions > _LOGPROBS:
        raise ValueError(
            f"{each} logprobs of each of {positions} tokens were requested, in total more than "
            f"{_LOGPROBS}; lower top_logprobs_num, or raise logprob_start_len"
        )


def check_positions(name: str, positions: Any, tokens: int) -> None:
    """Raises ValueError if positions lie outside a prompt of ``tokens`` tokens."""
    if positions and not all(type(at) is int and 0 <= at < tokens for at in positions):
        raise ValueError(
            f"{name} must be positions in the prompt, from 0 to below its {tokens} tokens"
        )


def check_labels(labels: Any, allowed: Sequence[str] | None) -> None:
    """Checks a request's ``custom_labels`` against the labels of SGLang's metrics.

    Raises:
        ValueError: names the first label that the metrics lack.
    """
    for label in labels or ():
        if label not in (allowed or ()):
            raise ValueError(
                f"custom_labels has {label!r:.100}; the server allows "
                f"{', '.join(allowed or ()) or 'none'} (--tokenizer-metrics-allowed-custom-labels)"
            )


def prompts_of(request: GenerateReqInput) -> int:
    """Returns the number of prompts of a request that SGLang has not normalized yet.

    Raises:
        ValueError: ``rid`` or the list of prompts is empty.
    """
    if request.rid is not None and not request.rid:
        raise ValueError("rid is empty; omit it, or give an id for each prompt")
    prompts = request.text if request.text is not None else request.input_ids
    if prompts is None and (embeds := getattr(request, "input_embeds", None)):
        return 1 if isinstance(embeds[0][0], float) else len(embeds)
    if prompts is None or isinstance(prompts, str):
        return 1
    if not prompts:
        if getattr(request, "session_params", None):
            return 1  # the prompt is in the session
        raise ValueError(NO_TOKENS)
    return 1 if isinstance(prompts[0], int) else len(prompts)


def check_request(made: TokenizedReqInput, vocabulary: int, context: int) -> None:
    """Checks SGLang's ``TokenizedGenerateReqInput`` or ``TokenizedEmbeddingReqInput``.

    Args:
        context: maximum number of tokens of a sequence.

    Raises:
        ValueError: says what was found and what is possible.
    """
    tokens = len(made.input_ids or ())
    if not tokens and not made.input_embeds and not getattr(made, "session_params", None):
        raise ValueError(NO_TOKENS)
    if made.mm_inputs is None:  # otherwise some ids stand for images
        check_tokens("input_ids", made.input_ids or (), vocabulary)
    check_fields(made)
    check_sampling(made.sampling_params, vocabulary)
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        check_positions(name, getattr(made, name), tokens)
    if hasattr(made, "return_logprob"):
        check_logprobs(made, vocabulary, context)


def check_fields(made: TokenizedReqInput) -> None:
    """Checks that SGLang's scheduler can decode the fields of a request.

    Raises:
        ValueError: a field has another type; the message names it.
    """
    from sglang.srt.managers.embed_types import PositionalEmbeds
    from sglang.srt.managers.io_struct import _USE_PICKLE_IPC, msgpack_encode
    from sglang.srt.managers.utils import msgpack_decode_explained

    plain = copy.copy(made)
    plain.time_stats = plain.mm_inputs = None  # made by SGLang itself
    if isinstance(plain.positional_embed_overrides, PositionalEmbeds):
        plain.positional_embed_overrides = None  # made by a program from tensors
    if _USE_PICKLE_IPC:
        # custom_params may hold values of this package that are of none of SGLang's types.
        plain.sampling_params = copy.copy(plain.sampling_params)
        plain.sampling_params.custom_params = None
    msgpack_decode_explained(msgpack_encode(plain))
