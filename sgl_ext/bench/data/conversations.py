"""Multi-turn ShareGPT conversations as growing prompts, in token ids of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_ext.bench.data.texts import sharegpt_whole_conversations
from sgl_ext.errors import ExtError


@dataclass(frozen=True)
class Conversation:
    """Turns of one conversation, with the assistant's answers from the data set.

    Attributes:
        number: number of the conversation in the data set.
        prompts: token ids of the prompt of each turn: all earlier turns and the user's message.
        heard: token ids of each of ``prompts`` with the assistant's answer, which a server that
            gave this answer has in its cache. The next prompt begins with them, up to the
            template's tokens between turns.
    """

    number: int
    prompts: list[list[int]]
    heard: list[list[int]]


def conversations(
    model: Path,
    count: int,
    *,
    turns: int,
    tokens: tuple[int, int],
    but: Collection[Conversation] = (),
) -> list[Conversation]:
    """Returns the first ``count`` conversations with ``turns`` consecutive prompts of a length.

    Args:
        model: directory of the model whose tokenizer and chat template are used.
        tokens: minimum and maximum tokens of each prompt.
        but: conversations to leave out.

    Raises:
        ExtError: the data set has fewer such conversations.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    known = {conversation.number for conversation in but}
    found: list[Conversation] = []
    for number, texts in enumerate(sharegpt_whole_conversations()):
        if len(found) == count:
            return found
        # A token has about 4 characters, so a text that is far too short need not be tokenized.
        if number in known or sum(map(len, texts)) < 3 * tokens[0] or len(texts) < 2 * turns:
            continue
        if conversation := _turns(tokenizer, number, texts, turns, tokens):
            found.append(conversation)
    if len(found) == count:
        return found
    raise ExtError(
        f"ShareGPT has {len(found)} conversations with {turns} turns of {tokens[0]} to "
        f"{tokens[1]} tokens, not {count}"
    )


def _turns(
    tokenizer: Any, number: int, texts: list[str], turns: int, tokens: tuple[int, int]
) -> Conversation | None:
    def encode(end: int, *, asks: bool) -> list[int]:
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": texts[at]} for at in range(end)]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)
        return list(ids)

    prompts: list[list[int]] = []
    heard: list[list[int]] = []
    for end in range(1, len(texts), 2):
        prompt = encode(end, asks=True)
        if len(prompt) > tokens[1]:
            return None
        if len(prompt) >= tokens[0]:
            prompts.append(prompt)
            heard.append(encode(end + 1, asks=False))
        if len(prompts) == turns:
            return Conversation(number, prompts, heard)
    return None
