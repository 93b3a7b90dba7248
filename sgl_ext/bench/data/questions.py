"""Questions over several documents, from data sets inside a package."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sgl_ext.packages import PackagedFile, fetch

QuestionSet = Literal["hotpotqa", "2wikimultihopqa", "musique"]


def _packaged(name: str, sha256: str, size: int) -> PackagedFile:
    return PackagedFile(
        requirement="vector-graph-rag==0.4.0",
        member=f"vector_graph_rag-0.4.0/evaluation/data/{name}.json",
        sha256=sha256,
        size=size,
        sdist=True,
    )


SETS: dict[QuestionSet, PackagedFile] = {
    "hotpotqa": _packaged(
        "hotpotqa", "64654fe78f44ffe6dabd44693743bf620e6051613a6241b4568583ce233f3b2c", 8_130_985
    ),
    "2wikimultihopqa": _packaged(
        "2wikimultihopqa",
        "895cba294064df0c3302c76847b1fc08d99b5619f7663dfaa3b65cd780f1cac4",
        6_505_789,
    ),
    "musique": _packaged(
        "musique", "a1883c5edf273160a24d01f52b0b8e463d9e06ba023aeffb9bc40321af794c5f", 13_555_182
    ),
}
"""Files of the question sets: each has the 1,000 questions that HippoRAG was evaluated on."""


@dataclass(frozen=True)
class Document:
    """Paragraph of Wikipedia."""

    title: str
    text: str
    gold: bool
    """True if the question's answer follows from it together with the other gold documents."""

    def __str__(self) -> str:
        """Returns the document's text in prompts."""
        return f"Title: {self.title}\n{self.text}\n\n"


@dataclass(frozen=True)
class Question:
    """Question that no document answers alone.

    Attributes:
        set: name of its data set.
        number: number of the question in the data set.
        answers: right answers, any of which is accepted; the first is the data set's main answer.
        documents: documents, of which at least two are gold.
    """

    set: QuestionSet
    number: int
    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]


def questions(of: QuestionSet, *, seed: int = 0) -> list[Question]:
    """Returns all questions of a set in file order, with documents in an order set by ``seed``.

    Raises:
        ExtError: see :func:`sgl_ext.packages.fetch`.
    """
    records = json.loads(fetch(SETS[of]).read_text(encoding="utf-8"))
    return [_question(of, number, record, seed) for number, record in enumerate(records)]


def _question(of: QuestionSet, number: int, record: dict[str, Any], seed: int) -> Question:
    documents = list(dict.fromkeys(_documents(record)))  # 2WikiMultihopQA has some documents twice
    random.Random(f"{seed}/{of}/{number}").shuffle(documents)  # noqa: S311
    answers = dict.fromkeys([record["answer"], *record.get("answer_aliases", ())])
    return Question(of, number, record["question"], tuple(answers), tuple(documents))


def _documents(record: dict[str, Any]) -> Iterator[Document]:
    if "paragraphs" in record:  # MuSiQue
        for paragraph in record["paragraphs"]:
            text = paragraph["paragraph_text"].strip()
            yield Document(paragraph["title"], text, paragraph["is_supporting"])
        return
    gold = {title for title, _ in record["supporting_facts"]}
    for title, sentences in record["context"]:
        yield Document(title, " ".join(map(str.strip, sentences)), title in gold)
