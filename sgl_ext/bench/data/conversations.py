"""Multi-turn conversations of ShareGPT as growing prompts, in tokens of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_ext.bench.data.texts import sharegpt_whole_conversations
from sgl_ext.errors import ExtError


@dataclass(frozen=True)
class Conversation:
    """Turns of one conversation; what the assistant says is what the data set has.

    Attributes:
        number: of the conversation in the data set.
        prompts: for each turn all that was said before, and the user's words.
        heard: ``prompts`` with the assistant's answer: what a server that gave it has in its
            cache. The next prompt begins with it, up to the template's tokens between turns.
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
    """The first ``count`` conversations that have ``turns`` consecutive turns of a length.

    Args:
        model: directory of the model whose tokenizer and chat template are used.
        tokens: least and most tokens of each of the prompts.
        but: conversations that are not wanted again.

    Raises:
        ExtError: the data set has fewer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    known = {conversation.number for conversation in but}
    found: list[Conversation] = []
    for number, texts in enumerate(sharegpt_whole_conversations()):
        if len(found) == count:
            return found
        # Some 4 characters are a token: what is far too short needs no tokenizer.
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
