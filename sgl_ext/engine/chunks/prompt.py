"""Linking of prompts: turns marks into token ids and into parameters for schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from sgl_ext.chunks.compose import compose
from sgl_ext.chunks.contexts import Context, Contexts
from sgl_ext.engine.chunks.parameters import AUTOMATIC, COMPOSITION, MARKED
from sgl_ext.engine.core.sglang_types import GenerateReqInput, TokenizerManager
from sgl_ext.engine.front.custom_params import STORED, custom_params
from sgl_ext.errors import ExtError
from sgl_ext.marks import marked, unmarked

_UNSERVED = (
    ("input_ids", "its tokens are computed from its text"),
    ("input_embeds", "its tokens are computed from its text"),
    ("positional_embed_overrides", "its tokens are computed from its text"),
    ("lora_path", "contexts belong to the base model"),
    ("session_params", "a session continues from tokens, whose contexts it does not know"),
    ("token_indices_to_pool", "linked tokens have no hidden states"),
    ("multi_item_delimiter_indices", "linked tokens have no logits"),
)
"""Attributes of SGLang's ``GenerateReqInput`` that contexts do not support, and the reasons."""
_PER_PROMPT = (
    ("cache_salt", str), ("extra_key", str), ("sampling_params", dict), ("logprob_start_len", int),
)  # fmt: skip
"""Attributes that a batch may have for each prompt, and their types."""
_LARGEST_TOKEN = (1 << 31) - 1
_MOST_TOKENS = 1 << 24
"""Maximum tokens of all prompts of a request and of the prefixes of their contexts. Short marks can
stand for long texts, and the event loop composes all prompts at once."""


class _Asked(NamedTuple):
    """Prompt of a request, and its own values of :data:`_PER_PROMPT`."""

    text: object
    salt: str | None
    key: str | None
    params: Mapping[str, object] | None
    start: int | None


class _Linked(NamedTuple):
    """Prompt in the form that SGLang takes."""

    input_ids: list[int]
    extra_key: str
    sampling_params: dict[str, object]
    size: int
    """Tokens of the prompt and of the prefixes of its contexts."""


class PromptLinking:
    """Linking of the prompts of one server.

    Args:
        manager: SGLang's ``TokenizerManager``.
        contexts: registry of the contexts.
        encode: returns the token ids of a text; its second argument is True if the text begins
            the prompt.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        contexts: Contexts,
        encode: Callable[[str, bool], list[int]],
    ) -> None:
        self._manager = manager
        self._contexts = contexts
        self._encode = encode

    def link(self, request: GenerateReqInput) -> list[Context]:
        """Replaces the marks in SGLang's ``GenerateReqInput`` by the tokens of their contexts.

        Contexts that the user has not named are put back as text if they cannot be linked.

        Returns:
            The context of each mark, in order; empty if the request has no marks.

        Raises:
            UnknownContextError: a mark names no context of the request's tenant.
            ExtError: the request has an attribute that contexts do not support, a malformed field,
                or prompts that are too long.
        """
        custom = custom_params(request.sampling_params)
        automatic, named = custom.pop(AUTOMATIC, None), MARKED in custom
        if not isinstance(automatic, Mapping):
            return self._link_all(request, chat=request.text is None and named)
        tokenized = request.text is None
        try:
            return self._link_all(request, chat=tokenized)
        except ExtError:
            if tokenized:
                text = self._decode(request.input_ids)
                if (plain := unmarked(text, automatic)) != text:
                    request.input_ids = self._encode(plain, False)
            elif isinstance(request.text, str):
                request.text = unmarked(request.text, automatic)
            return self._link_all(request, chat=tokenized and named)

    def _link_all(self, request: GenerateReqInput, *, chat: bool) -> list[Context]:
        """Links the contexts of a request; see :meth:`link`.

        Args:
            chat: whether SGLang has tokenized the prompt, with marks in it.
        """
        several = isinstance(request.text, list)
        texts = request.text if several else [request.text]
        if chat:
            texts = [self._decode(request.input_ids)]
        if not any(isinstance(text, str) and marked(text) for text in texts):
            if chat:
                raise ExtError(
                    "the prompt of this chat does not contain its contexts: the chat template "
                    "drops them, or the request has input_ids, which a chat with contexts does "
                    "not support; omit input_ids, or send the prompt to /generate"
                )
            return []
        for name, why in _UNSERVED:
            if _given(getattr(request, name)) and not (chat and name == "input_ids"):
                raise ExtError(f"a prompt with contexts does not support {name}: {why}")
        named: list[Context] = []
        columns = (_each(request, name, type_, len(texts)) for name, type_ in _PER_PROMPT)
        linked, size = [], 0
        for each in zip(texts, *columns, strict=True):
            one = self._link(_Asked(*each), bool(request.return_logprob), chat, named)
            linked.append(one)
            if (size := size + one.size) > _MOST_TOKENS:
                raise ExtError(
                    f"prompt {len(linked) - 1} of {len(texts)}: the prompts up to it have {size} "
                    "tokens, with their contexts and the prefixes of these; a request with "
                    f"contexts may have {_MOST_TOKENS}; send fewer prompts at once"
                )
        request.text = None
        request.input_ids, request.extra_key, request.sampling_params, _ = (
            [*column] if several else column[0] for column in zip(*linked, strict=True)
        )
        return named

    def _link(self, asked: _Asked, logprobs: bool, chat: bool, named: list[Context]) -> _Linked:
        """Links one prompt, and appends its contexts to ``named``."""
        if not isinstance(asked.text, str):
            raise ExtError(
                f"in a batch with contexts, each prompt must be a text, found {asked.text!r:.200}"
            )
        params = asked.params or {}
        custom = params.get("custom_params") or {}
        if not isinstance(custom, Mapping):
            raise ExtError(
                f"custom_params of a prompt with contexts must be an object, found {custom!r}"
            )

        def context_of(id_: str) -> Context:
            named.append(self._contexts.get(id_, asked.salt))
            return named[-1]

        prompt = compose(
            asked.text,
            context_of=context_of,
            # The text of a chat already contains the tokens that begin a prompt.
            tokenize=lambda part, first: self._encode(part, first and not chat),
            longest=self._manager.context_len,
        )
        if prompt.composition is None:
            return _Linked(prompt.tokens, asked.key or "", dict(params), len(prompt.tokens))
        if custom.get(STORED) is not None:
            raise ExtError(
                f"a prompt with contexts cannot use a stored context; omit {STORED} from "
                "custom_params, or write the texts of the contexts into the prompt"
            )
        if logprobs and asked.start is not None:
            try:
                prompt.composition.check_logprobs(asked.start)
            except ValueError as error:
                raise ExtError(str(error)) from None
        told = {name: value for name, value in custom.items() if name != MARKED}
        told[COMPOSITION] = msgspec.to_builtins(prompt.composition)
        suffix = f":{asked.key}" if asked.key else ""
        return _Linked(
            prompt.tokens,
            f"{prompt.composition.extra_key}{suffix}",
            {**params, "custom_params": told},
            len(prompt.tokens) + sum(map(len, prompt.composition.preparations)),
        )

    def _decode(self, ids: object) -> str:
        """Returns the text of a chat that SGLang has tokenized with the marks in it."""
        text = self._text_of(ids)
        if self._encode(text, False) != ids:
            raise ExtError(
                "contexts in a chat require a prompt whose tokens decode to its text, and the "
                "tokens of this one do not (a tokenizer that loses characters, or a continued "
                "last message); send the prompt to /generate"
            )
        return text

    def _text_of(self, ids: object) -> str:
        if not isinstance(ids, list) or not all(
            isinstance(token, int) and 0 <= token <= _LARGEST_TOKEN for token in ids
        ):
            raise ExtError(f"{MARKED} is reserved for the server; omit it")
        text: str = self._manager.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def _each(request: object, name: str, type_: type, count: int) -> list[object]:
    """Returns the value of a field for each of ``count`` prompts."""
    found = getattr(request, name)
    values = found if isinstance(found, list) else [found] * count
    if len(values) != count or not all(isinstance(value, type_ | None) for value in values):
        raise ExtError(
            f"{name} of prompts with contexts must be one {type_.__name__} or a list of {count}, "
            f"found {found!r:.200}"
        )
    return values


def _given(value: object) -> bool:
    """Returns whether a field has a value for at least one prompt.

    Clients send an empty string for a field that they do not use.
    """
    return any(map(_given, value)) if isinstance(value, list) else value not in (None, "", {})
