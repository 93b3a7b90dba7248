"""Prompts of chunks: a prefix, documents in chunks, and a question."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sgl_ext.bench.data.questions import Document, Question
from sgl_ext.errors import ExtError

CHUNK_TOKENS = 512
"""Default of the tokens of a chunk, as in EPIC §4.2."""
_SYSTEM = "You answer questions about documents. Answer with a few words, without a sentence."
_HOLE = "\ue0c2"
"""Placeholder for the documents: a private-use character, which chat templates do not change."""


@dataclass(frozen=True)
class Prompt:
    """Prompt whose parts were tokenized separately.

    Attributes:
        name: name of the question; equal for prompts that differ only in their chunks.
        prefix: text before the first chunk.
        chunks: token ids of each chunk. There may be no text that is tokenized into them, because
            most chunks end within a document.
        question: text after the last chunk, up to the start of the assistant's answer.
        answers: right answers, any of which is accepted.
        tokens: token ids of the whole prompt, for a server that does not link chunks.
    """

    name: str
    prefix: str
    chunks: tuple[tuple[int, ...], ...]
    question: str
    answers: tuple[str, ...]
    tokens: tuple[int, ...]


class Template:
    """Text that a chat template writes around documents and a question.

    Args:
        tokenizer: a ``transformers`` tokenizer.

    Raises:
        ExtError: the tokenizer has no chat template.
    """

    @classmethod
    def of_model(cls, model: Path) -> Template:
        """Returns the template of the model in a folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

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
        """Returns the token ids of a part, with no special tokens but those written in it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def question(self, text: str) -> str:
        """Returns the text after the documents, for a question."""
        return f"Question: {text}\nAnswer with a few words.{self._end}"

    def cut(self, ids: Sequence[int], size: int) -> list[int]:
        """Returns at most ``size`` tokens of a document, with the ending of a whole document."""
        if len(ids) <= size:
            return list(ids)
        return [*ids[: max(size - len(self._break), 0)], *self._break][:size]

    def sizes(self, question: str, *, length: int, tokens: int = CHUNK_TOKENS) -> list[int]:
        """Returns the number of tokens of each chunk of a prompt of ``length`` tokens.

        All chunks except the last have ``tokens`` tokens. If the last one would have less than a
        quarter of that, it shares its tokens evenly with the chunk before it, because linking few
        tokens saves nothing.

        Raises:
            ExtError: prefix and question alone have ``length`` tokens or more.
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
        """Returns the prompt of these chunks, in an order that ``seed`` and ``name`` determine."""
        return self._assembled(name, chunks, self.question(question), answers, seed)

    def reordered(self, prompt: Prompt, *, seed: int) -> Prompt:
        """Returns the prompt with its chunks in the order that ``seed`` determines."""
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
    """Returns prompts of the first ``count`` questions whose gold documents are small enough.

    Another seed gives the same chunks in other orders.

    Args:
        questions: questions of one set; documents of the others fill up a question that has too
            few.
        length: tokens of each prompt.
        tokens: maximum tokens of a chunk.

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
    """Returns prompts of the first ``count`` questions; each document is an unchanged chunk.

    Args:
        distractors: maximum number of documents besides the gold ones; None for all.

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
    """Returns the gold documents and at most ``distractors`` others, in the given order."""
    others = [document for document in documents if not document.gold]
    kept = others[:distractors]
    return [document for document in documents if document.gold or document in kept]


def merged(
    template: Template, question: Question, others: Sequence[Question], sizes: Sequence[int]
) -> list[list[int]] | None:
    """Merges documents into chunks of exactly ``sizes`` tokens.

    Each gold document is whole, in a random chunk that has room for it. The question's other
    documents fill the chunks up, then the documents of ``others``. The last document of a chunk is
    cut off at the end of the chunk.

    Returns:
        Token ids of each chunk; None if the gold documents do not fit.

    Raises:
        ExtError: there are too few documents.
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
                raise ExtError(
                    f"{len(others)} questions have too few documents for {sum(sizes)} tokens"
                )
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
