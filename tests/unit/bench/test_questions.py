"""Prompts of chunks from questions and needles, and the scores of answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgl_ext.bench.chunks.prompts import (
    Prompt,
    Template,
    document_prompts,
    merged,
    question_prompts,
)
from sgl_ext.bench.data.needles import essays, needle, needle_prompts
from sgl_ext.bench.data.questions import SETS, Question, QuestionSet, questions
from sgl_ext.bench.data.scores import exact_match, f1, mean_interval, normalised
from sgl_ext.errors import ExtError

QWEN = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Part of Qwen2.5's chat template that formats system prompts and user messages."""


def fresh_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def template(model: Path) -> Template:
    return Template(fresh_tokenizer(model))


@pytest.fixture(scope="module")
def wiki() -> list[Question]:
    return questions("2wikimultihopqa")


def occurrences(part: Sequence[int], chunk: Sequence[int]) -> int:
    part = tuple(part)
    return sum(tuple(chunk[at : at + len(part)]) == part for at in range(len(chunk)))


def check(prompt: Prompt, template: Template, length: int, most: int) -> None:
    assert len(prompt.tokens) == length
    assert all(len(chunk) <= most for chunk in prompt.chunks)
    linked = [token for chunk in prompt.chunks for token in chunk]
    assert prompt.tokens == (
        *template.encode(prompt.prefix), *linked, *template.encode(prompt.question)
    )  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_every_question_has_gold_documents_and_answers(name: QuestionSet) -> None:
    found = questions(name)
    assert [question.number for question in found] == list(range(1000))
    for question in found:
        assert question.question
        assert all(question.answers)
        assert all(document.text for document in question.documents)
        gold = sum(document.gold for document in question.documents)
        assert 2 <= gold <= 4
        assert len(question.documents) == len({*question.documents})
        if name == "musique":
            assert gold < len(question.documents)
    # In the order of the file, gold documents have the same positions in many questions.
    assert len({question.documents[0].gold for question in found}) == 2
    other = questions(name, seed=1)
    assert found == questions(name)
    assert [set(question.documents) for question in found] == [
        set(question.documents) for question in other
    ]
    same = sum(a.documents == b.documents for a, b in zip(found, other, strict=True))
    assert same < 10


def test_data_sets_have_the_expected_content(wiki: list[Question]) -> None:
    first = questions("hotpotqa")[0]
    assert first.answers == ("great-grandfather",)
    assert {document.title for document in first.documents if document.gold} == {
        "Fred Gehrke",
        "Christian Yelich",
    }
    (document,) = (each for each in first.documents if each.title == "Fred Gehrke")
    assert str(document).startswith("Title: Fred Gehrke\nClarence Fred Gehrke (April 24, 1918")
    assert ". He played in the National Football League" in document.text
    assert str(document).endswith("Christian Yelich\n\n")
    assert wiki[0].question == "When did Lothair Ii's mother die?"
    assert wiki[0].answers == ("20 March 851",)
    aliases = [len(question.answers) for question in questions("musique")]
    assert sum(count > 1 for count in aliases) > 200


@pytest.mark.parametrize("chat", [None, QWEN], ids=["own", "qwen"])
def test_prompt_parts_equal_the_chat_template_of_the_whole(
    model: Path, chat: str | None, wiki: list[Question]
) -> None:
    tokenizer = fresh_tokenizer(model)
    tokenizer.chat_template = chat or tokenizer.chat_template
    template = Template(tokenizer)
    (prompt,) = question_prompts(template, wiki, 1, length=1000)
    user = "<|im_start|>user\n"
    system, _, rest = prompt.prefix.partition(user)
    assert system.startswith("<|im_start|>system\n")
    documents = "".join(map(tokenizer.decode, prompt.chunks))
    after = prompt.question.partition("<|im_end|>")[0]
    words = system.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    messages = [
        {"role": "system", "content": words},
        {"role": "user", "content": rest + documents + after},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(prompt.tokens) == whole
    assert wiki[0].question in after


def test_a_model_without_a_chat_template_is_refused(model: Path) -> None:
    tokenizer = fresh_tokenizer(model)
    tokenizer.chat_template = None
    with pytest.raises(ExtError, match="has no chat template"):
        Template(tokenizer)


@pytest.mark.parametrize(("length", "most"), [(1024, 512), (3000, 512), (7168, 512), (2000, 96)])
def test_every_prompt_contains_its_gold_documents_once(
    template: Template, wiki: list[Question], length: int, most: int
) -> None:
    prompts = question_prompts(template, wiki, 12, length=length, tokens=most)
    for prompt in prompts:
        check(prompt, template, length, most)
        assert sum(len(chunk) < most for chunk in prompt.chunks) <= 2
        question = wiki[int(prompt.name.rpartition("/")[2])]
        assert prompt.answers == question.answers
        gold = [template.encode(str(each)) for each in question.documents if each.gold]
        for ids in gold:
            assert sum(occurrences(ids, chunk) for chunk in prompt.chunks) == 1
    assert len({prompt.name for prompt in prompts}) == 12


def test_every_chunk_ends_with_an_empty_line(template: Template, wiki: list[Question]) -> None:
    for prompt in question_prompts(template, wiki, 4, length=4000):
        for chunk in prompt.chunks:
            assert template.tokenizer.decode(chunk).endswith("\n\n")


def test_another_seed_reorders_the_same_chunks(template: Template, wiki: list[Question]) -> None:
    def make(seed: int) -> tuple[list[Prompt], list[Prompt]]:
        return (
            question_prompts(template, wiki, 6, length=3000, seed=seed),
            needle_prompts(template, 6, length=3000, seed=seed),
        )

    assert make(0) == make(0)
    for once, other in zip(make(0), make(1), strict=True):
        for first, second in zip(once, other, strict=True):
            assert sorted(first.chunks) == sorted(second.chunks)
        moved = sum(a.chunks[0] != b.chunks[0] for a, b in zip(once, other, strict=True))
        assert moved >= 3


def test_reordered_changes_only_the_order_of_chunks(
    template: Template, wiki: list[Question]
) -> None:
    (prompt,) = question_prompts(template, wiki, 1, length=2048, tokens=128)
    others = [template.reordered(prompt, seed=seed) for seed in range(20)]
    assert len({other.chunks for other in others}) > 15
    for other in others:
        assert sorted(other.chunks) == sorted(prompt.chunks)
        assert other == replace(prompt, chunks=other.chunks, tokens=other.tokens)
        check(other, template, 2048, 128)
    assert template.reordered(others[0], seed=1) == others[1]


def test_document_prompts_have_one_chunk_per_document(
    template: Template, wiki: list[Question]
) -> None:
    prompts = document_prompts(template, wiki, 5)
    for question, prompt in zip(wiki, prompts, strict=False):
        documents = [tuple(template.encode(str(each))) for each in question.documents]
        assert sorted(prompt.chunks) == sorted(documents)
        assert prompt.answers == question.answers
        check(prompt, template, len(prompt.tokens), max(map(len, documents)))
    with pytest.raises(ExtError, match="there are 5 questions, not 6"):
        document_prompts(template, wiki[:5], 6)


def test_a_limit_of_distractors_keeps_gold_documents(template: Template) -> None:
    asked = questions("hotpotqa")[:20]
    whole = document_prompts(template, asked, 20)
    few = document_prompts(template, asked, 20, distractors=1)
    for question, all_of_it, some in zip(asked, whole, few, strict=True):
        gold = {tuple(template.encode(str(each))) for each in question.documents if each.gold}
        assert gold < set(some.chunks) < set(all_of_it.chunks)
        assert len(some.chunks) == len(gold) + 1


def test_gold_documents_are_spread_over_all_chunks(
    template: Template, wiki: list[Question]
) -> None:
    places: list[set[int]] = []
    for prompt in question_prompts(template, wiki, 30, length=2000):
        question = wiki[int(prompt.name.rpartition("/")[2])]
        gold = [template.encode(str(each)) for each in question.documents if each.gold]
        places.append(
            {[occurrences(ids, chunk) for chunk in prompt.chunks].index(1) for ids in gold}
        )
    assert set.union(*places) == {0, 1, 2, 3}
    assert sum(len(chunks) > 1 for chunks in places) > 15


def test_documents_of_other_questions_fill_the_chunks(
    template: Template, wiki: list[Question]
) -> None:
    gold = tuple(each for each in wiki[0].documents if each.gold)
    alone = replace(wiki[0], documents=gold)
    others = wiki[1:50]
    chunks = merged(template, alone, others, [512, 512])
    assert chunks is not None
    assert [len(chunk) for chunk in chunks] == [512, 512]
    text = "".join(map(template.tokenizer.decode, chunks))
    titles = {document.title for question in others for document in question.documents}
    known = {line[7:] for line in text.splitlines() if line.startswith("Title: ")}
    assert len(known & titles) >= 3
    with pytest.raises(ExtError, match="1 questions have too few documents for 1024"):
        merged(template, alone, [alone], [512, 512])


def test_questions_whose_gold_documents_do_not_fit_are_skipped(
    template: Template, wiki: list[Question]
) -> None:
    assert merged(template, wiki[0], wiki, [16, 16]) is None
    with pytest.raises(ExtError, match=r"of 3 questions 0 have gold .* 16 tokens in .* 1000, not"):
        question_prompts(template, wiki[:3], 1, length=1000, tokens=16)
    long = replace(wiki[0].documents[0], text="word " * 600, gold=True)
    first = replace(wiki[0], documents=(long, *wiki[0].documents[1:]))
    (prompt,) = question_prompts(template, [first, *wiki[1:]], 1, length=3000)
    assert prompt.name == "2wikimultihopqa/1"


def test_chunk_sizes_add_up_to_the_length_and_are_bounded(template: Template) -> None:
    parts = (template.prefix, template.question("Why?"))
    around = sum(len(template.encode(part)) for part in parts)
    for length in random.Random(0).sample(range(around + 1, 8000), 200):  # noqa: S311
        sizes = template.sizes("Why?", length=length)
        assert sum(sizes) + around == length
        assert max(sizes) <= 512
        assert len(sizes) == 1 or min(sizes) >= 128
        assert sizes[:-2] == [512] * len(sizes[:-2])
    with pytest.raises(ExtError, match=f"question have {around} tokens; ask for more than 20"):
        template.sizes("Why?", length=20)


@pytest.mark.parametrize(
    ("length", "most", "count"),
    [(600, 512, 10), (1024, 512, 10), (7168, 512, 10), (2000, 128, 10), (150, 48, 150)],
)
def test_exactly_one_chunk_contains_the_needle(
    template: Template, length: int, most: int, count: int
) -> None:
    for number, prompt in enumerate(needle_prompts(template, count, length=length, tokens=most)):
        check(prompt, template, length, most)
        assert sum(len(chunk) < most for chunk in prompt.chunks) <= 2
        hidden = needle(number)
        assert prompt.answers == (hidden.code,)
        assert hidden.question in prompt.question
        inserted = template.encode(hidden.sentence)
        assert sorted(occurrences(inserted, chunk) for chunk in prompt.chunks)[-2:] in (
            [1],
            [0, 1],
        )
        text = template.tokenizer.decode(prompt.tokens)
        assert text.count(hidden.code) == 1
        assert text.count(hidden.city) >= 2


def test_needles_differ_and_do_not_occur_in_the_essays(template: Template) -> None:
    needles = [needle(number) for number in range(90)]
    assert len({hidden.code for hidden in needles}) == 90
    assert len({hidden.city for hidden in needles[:30]}) == 30
    assert "secret code of" not in essays()
    assert essays().startswith("April 2012")
    chunks = [
        chunk for prompt in needle_prompts(template, 8, length=3000) for chunk in prompt.chunks
    ]
    assert len({*chunks}) > 0.9 * len(chunks)
    with pytest.raises(ExtError, match="too small for a needle"):
        needle_prompts(template, 1, length=1000, tokens=12)
    with pytest.raises(ExtError, match="the essays have 743 chunks of 512, not"):
        needle_prompts(template, 1, length=400_000)


def test_needles_follow_a_sentence_at_different_depths(template: Template) -> None:
    depths = []
    for number, prompt in enumerate(needle_prompts(template, 20, length=700)):
        text = template.tokenizer.decode(prompt.tokens)
        before, found, _ = text.partition(needle(number).sentence)
        assert found
        assert before.endswith((".", "?", "!"))
        depths.append(len(before) / len(text))
    assert min(depths) < 0.4
    assert max(depths) > 0.6


def test_answers_are_scored_by_their_normalised_words() -> None:
    assert normalised(" The Eiffel-Tower,  in\nan  area!") == "eiffeltower in area"
    assert exact_match("The Eiffel Tower.", ["eiffel tower"]) == 1
    assert exact_match("Eiffel", ["eiffel tower", "Eiffel!"]) == 1
    assert exact_match("Eiffel", ["eiffel tower"]) == 0
    assert f1("the Eiffel Tower in Paris", ["Eiffel Tower"]) == pytest.approx(2 / 3)
    assert f1("Tower Tower", ["Eiffel Tower"]) == pytest.approx(1 / 2)
    assert f1("Paris", ["London", "Paris, France"]) == pytest.approx(2 / 3)
    assert f1("London", ["Paris"]) == 0
    assert f1("The", ["a"]) == 1
    assert f1("", ["Paris"]) == 0


def test_mean_interval_agrees_with_the_normal_approximation() -> None:
    scores = [0.0, 1.0] * 200
    interval = mean_interval(scores)
    assert interval == mean_interval(scores)
    assert interval.mean == 0.5
    half = 1.96 * 0.5 / 400**0.5  # half the interval of the normal approximation
    assert interval.low == pytest.approx(0.5 - half, abs=0.005)
    assert interval.high == pytest.approx(0.5 + half, abs=0.005)
    wider = mean_interval(scores, confidence=0.99)
    assert wider.low < interval.low < interval.high < wider.high
    assert mean_interval([0.25] * 5) == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="two or more"):
        mean_interval([1.0])
