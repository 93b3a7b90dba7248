"""Prompts of chunks: a prefix, documents in chunks of some size, and a question."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sgl_ext.bench.data.questions import Document, Question
from sgl_ext.errors import ExtError

CHUNK_TOKENS = 512
"""As in EPIC §4.2."""
_SYSTEM = "You answer questions about documents. Answer with a few words, without a sentence."
_HOLE = "\ue0c2"
"""A private-use character, which a template leaves alone."""


@dataclass(frozen=True)
class Prompt:
    """A prompt whose parts were tokenised each by itself.

    Attributes:
        name: of the question; equal where prompts differ only in their chunks.
        prefix: text up to the first chunk.
        chunks: token ids. There need not be a text that is tokenised into them: most end amid a
            document.
        question: text from the last chunk to where the assistant's answer begins.
        answers: any of them is right.
        tokens: token ids of all of it, for a server that links nothing.
    """

    name: str
    prefix: str
    chunks: tuple[tuple[int, ...], ...]
    question: str
    answers: tuple[str, ...]
    tokens: tuple[int, ...]


class Template:
    """What a chat template writes around documents and a question.

    Args:
        tokenizer: a ``transformers`` tokenizer.

    Raises:
        ExtError: it has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ExtError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; use the "
                "instruction-tuned model"
            )
        self.tokenizer = tokenizer
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"Documents:\n\n{_HOLE}"},
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        self.prefix, _, self._end = text.partition(_HOLE)
        self._break = self.encode("\n\n")

    def encode(self, text: str) -> list[int]:
        """Token ids of a part; special tokens are only those that are written in it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def question(self, text: str) -> str:
        """All that follows the documents."""
        return f"Question: {text}\nAnswer with a few words.{self._end}"

    def cut(self, ids: Sequence[int], size: int) -> list[int]:
        """At most ``size`` tokens of a document, which end as a whole one does."""
        if len(ids) <= size:
            return list(ids)
        return [*ids[: max(size - len(self._break), 0)], *self._break][:size]

    def sizes(self, question: str, *, length: int, tokens: int = CHUNK_TOKENS) -> list[int]:
        """Tokens of each chunk of a prompt of ``length`` tokens.

        All have ``tokens``, except the last; it shares with the one before it if it would have
        less than a quarter of that, for linking a few tokens saves nothing.

        Raises:
            ExtError: prefix and question alone are that long.
        """
        around = len(self.encode(self.prefix)) + len(self.encode(self.question(question)))
        if around >= length:
            raise ExtError(f"prefix and question have {around} tokens; ask for more than {length}")
        full, rest = divmod(length - around, tokens)
        sizes = [tokens] * full + [rest] * (rest > 0)
        if full and 0 < rest < tokens // 4:
            sizes[-2:] = [(tokens + rest + 1) // 2, (tokens + rest) // 2]
        return sizes

    def prompt(
        self,
        name: str,
        chunks: Sequence[Sequence[int]],
        question: str,
        answers: Sequence[str],
        *,
        seed: int,
    ) -> Prompt:
        """The prompt of these chunks, in an order of the seed's."""
        return self._assembled(name, chunks, self.question(question), answers, seed)

    def reordered(self, prompt: Prompt, *, seed: int) -> Prompt:
        """The prompt with its chunks in an order of the seed's."""
        return self._assembled(
            prompt.name, sorted(prompt.chunks), prompt.question, prompt.answers, seed
        )

    def _assembled(
        self,
        name: str,
        chunks: Sequence[Sequence[int]],
        after: str,
        answers: Sequence[str],
        seed: int,
    ) -> Prompt:
        ordered = [*map(tuple, chunks)]
        random.Random(f"{seed}/{name}").shuffle(ordered)  # noqa: S311
        tokens = [*self.encode(self.prefix), *chain.from_iterable(ordered), *self.encode(after)]
        return Prompt(name, self.prefix, tuple(ordered), after, tuple(answers), tuple(tokens))


def question_prompts(
    template: Template,
    questions: Sequence[Question],
    count: int,
    *,
    length: int,
    tokens: int = CHUNK_TOKENS,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts of the first ``count`` questions whose gold documents are small enough.

    With another seed they are of the same chunks in other orders.

    Args:
        questions: of one set; the documents of all of them serve where one question has too few.
        length: tokens of each prompt.
        tokens: of a chunk, at most.

    Raises:
        ExtError: there are fewer such questions, or too few documents.
    """
    prompts: list[Prompt] = []
    for question in questions:
        if len(prompts) == count:
            break
        sizes = template.sizes(question.question, length=length, tokens=tokens)
        if chunks := merged(template, question, questions, sizes):
            name = f"{question.set}/{question.number}"
            prompts.append(
                template.prompt(name, chunks, question.question, question.answers, seed=seed)
            )
    if len(prompts) < count:
        raise ExtError(
            f"of {len(questions)} questions {len(prompts)} have gold documents that fit chunks of "
            f"{tokens} tokens in prompts of {length}, not {count}"
        )
    return prompts


def document_prompts(
    template: Template,
    questions: Sequence[Question],
    count: int,
    *,
    distractors: int | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts of the first ``count`` questions, each of their documents a chunk, as it is.

    Args:
        distractors: documents beside the gold ones, at most; all if not given.

    Raises:
        ExtError: there are fewer questions.
    """
    if len(questions) < count:
        raise ExtError(f"there are {len(questions)} questions, not {count}")
    return [
        template.prompt(
            f"{each.set}/{each.number}",
            [template.encode(str(document)) for document in _few(each.documents, distractors)],
            each.question,
            each.answers,
            seed=seed,
        )
        for each in questions[:count]
    ]


def _few(documents: Sequence[Document], distractors: int | None) -> list[Document]:
    """The gold ones, and as many others at most, in the order that they have."""
    others = [document for document in documents if not document.gold]
    kept = others[:distractors]
    return [document for document in documents if document.gold or document in kept]


def merged(
    template: Template, question: Question, others: Sequence[Question], sizes: Sequence[int]
) -> list[list[int]] | None:
    """Documents in chunks of exactly ``sizes`` tokens.

    The gold ones are whole, in any of the chunks. The question's other documents fill the chunks
    up, then those of ``others``; the last of a chunk is cut off where it ends.

    Returns:
        Token ids of each chunk; None if the gold documents do not fit.

    Raises:
        ExtError: too few documents.
    """
    chance = random.Random(f"{question.set}/{question.number}")  # noqa: S311
    gold = [template.encode(str(each)) for each in question.documents if each.gold]
    chunks: list[list[list[int]]] = [[] for _ in sizes]
    room = list(sizes)
    for document in sorted(gold, key=len, reverse=True):
        if not (fitting := [at for at, free in enumerate(room) if free >= len(document)]):
            return None
        at = chance.choice(fitting)
        chunks[at].append(document)
        room[at] -= len(document)
    fillers = _fillers(question, others, chance)
    for at, chunk in enumerate(chunks):
        while room[at]:
            if (filler := next(fillers, None)) is None:
                raise ExtError(f"{len(others)} questions have too few documents for {sum(sizes)}")
            chunk.append(template.cut(template.encode(str(filler)), room[at]))
            room[at] -= len(chunk[-1])
        whole = chunk[:-1]
        chance.shuffle(whole)
        chunk[:-1] = whole
    return [[token for document in chunk for token in document] for chunk in chunks]


def _fillers(
    question: Question, others: Sequence[Question], chance: random.Random
) -> Iterator[Document]:
    seen = {document.text for document in question.documents if document.gold}
    for each in (question, *chance.sample(others, len(others))):
        for document in each.documents:
            if document.text not in seen:
                seen.add(document.text)
                yield document
