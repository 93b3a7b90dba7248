"""Composition of a prompt from chunks; its plan links available KV and computes the rest."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.chunks.composition import LEAD, Composition, LinkedChunk, Selection
from sgl_ext.planning.plan import Compute, Link, Span


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Composition, int, list[int]]:
    chunks, at = [], 0
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 6))
        length = draw(st.integers(1, 12))
        offsets = tuple(sorted(draw(st.sets(st.integers(0, length - 1)))))
        chunks.append(LinkedChunk(at, length, draw(st.integers(0, 1)), offsets))
        at += length
    composition = Composition("lego-2", "chunks", ((1, 2), ()), tuple(chunks))
    found = [draw(st.integers(0, chunk.length)) for chunk in chunks]
    last_is_computed = chunks[-1].length - 1 in chunks[-1].recompute
    behind = draw(st.integers(0 if last_is_computed else 1, 6))
    return composition, at + behind, found


@given(prompts(), st.integers(0, 60), st.sampled_from([(0, 0), (15, 0), (0, 15)]))
def test_kv_of_another_prompt_is_linked_as_the_lead(
    prompt: tuple[Composition, int, list[int]], lead: int, selected: tuple[int, int]
) -> None:
    composition, length, found = prompt
    blend, query = selected
    chunks = [
        msgspec.structs.replace(chunk, blend=blend, query=query) for chunk in composition.chunks
    ]
    composition = msgspec.structs.replace(composition, chunks=tuple(chunks))
    lead = min(lead, length - 1)
    available = [[range(count)] if count else [] for count in found]
    leads = [range(lead)] if lead else []
    plan = composition.plan(length, available, leads, blend_share=0.1)
    without = composition.plan(length, available)
    assert list(plan.between(0, lead)) == ([Span(0, lead, Link(LEAD, 0))] if lead else [])
    expected = [(type(span.source), span[:2]) for span in without.between(lead, length)]
    assert [(type(span.source), span[:2]) for span in plan.between(lead, length)] == expected
    works = {span.source.work for span in plan.between(lead, length)}
    assert works <= {1.0, 0.15 + 0.85 * 0.1 if blend else query / 100}


def test_the_end_of_a_prompt_selects_as_many_tokens_as_a_forward_computes() -> None:
    chunks = LinkedChunk(10, 400, 0, (), 0, 66), LinkedChunk(420, 100, 0)
    composition = Composition("any", "ns", ((),), chunks)
    every = [[range(400)], [range(100)]]
    for budget, wanted in ((None, 264), (8192, 264), (256, 216), (40, 20)):
        plan = composition.plan(550, every, budget=budget)
        assert composition.selected(plan.between(0, 550)) == wanted
        assert plan.undivided == 10
        assert plan.computed(10, 550) == wanted + 40
    assert composition.selected(plan.between(210, 550)) == 10
    plain = Composition("any", "ns", ((),), (LinkedChunk(10, 400, 0, (), 15), chunks[1]))
    assert plain.plan(550, every, budget=40).undivided is None
    assert plain.selected(plain.plan(550, every, budget=40).spans) == 0


@given(prompts())
def test_available_tokens_are_linked_and_the_rest_is_computed(
    prompt: tuple[Composition, int, list[int]],
) -> None:
    composition, length, found = prompt
    composition.check(length, composition.extra_key)
    composition.check(length, f"{composition.extra_key}:user")
    # The last tokens of a chunk may be here while its first ones are not.
    available = [
        [range(count - count // 3)] * (count > 0) + [range(count, chunk.length)] * (count % 2)
        for chunk, count in zip(composition.chunks, found, strict=True)
    ]
    available = [[one for one in each if one] for each in available]
    plan = composition.plan(length, available)
    expected: list[object] = [Compute()] * length
    for number, (chunk, here) in enumerate(zip(composition.chunks, available, strict=True)):
        for offset in {at for one in here for at in one} - set(chunk.recompute):
            expected[chunk.at + offset] = Link(number, chunk.at)
    assert len(plan) == length
    spans = plan.between(0, length)
    assert [span.source for span in spans for _ in range(span.start, span.end)] == expected
    wire = msgspec.to_builtins(composition)
    assert msgspec.convert(wire, Composition) == composition


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "the composition has no chunks"),
        ([LinkedChunk(0, 0, 0)], "chunk 0 covers tokens 0 .. -1"),
        ([LinkedChunk(-1, 2, 0)], "chunk 0 covers tokens -1 .. 0"),
        ([LinkedChunk(0, 5, 0), LinkedChunk(4, 2, 0)], "chunk 1 covers tokens 4 .. 5"),
        ([LinkedChunk(5, 5, 0)], "its last token must be computed"),
        ([LinkedChunk(0, 5, 1)], "preparation 1, but the composition has 1"),
        ([LinkedChunk(0, 5, 0, (), 100)], "blends 100 percent"),
        ([LinkedChunk(0, 5, 0, (), 0, 100)], "selects 100 percent by attention"),
        ([LinkedChunk(0, 5, 0, (), 5, 5)], "expected one of them"),
        ([LinkedChunk(0, 5, 0, (5,))], r"recomputes \(5,\)"),
        ([LinkedChunk(0, 5, 0, (2, 1))], r"recomputes \(2, 1\)"),
    ],
)
def test_invalid_compositions_are_refused(chunks: list[LinkedChunk], message: str) -> None:
    composition = Composition("naive", "chunks", ((),), tuple(chunks))
    with pytest.raises(ValueError, match=message):
        composition.check(10, composition.extra_key)


@pytest.mark.parametrize("key", [None, "", "ext:link:0", "user"])
def test_linked_kv_is_refused_under_any_other_extra_key(key: str | None) -> None:
    composition = Composition("naive", "chunks", ((),), (LinkedChunk(0, 5, 0),))
    with pytest.raises(ValueError, match="other requests would reuse it as exact KV"):
        composition.check(10, key)


def test_computed_from_is_the_end_of_the_last_linked_span() -> None:
    def found(*chunks: LinkedChunk) -> int:
        return Composition("any", "ns", ((),), chunks).computed_from

    assert found(LinkedChunk(3, 10, 0)) == 13
    assert found(LinkedChunk(3, 10, 0, (0, 1))) == 13
    assert found(LinkedChunk(3, 10, 0, (8, 9))) == 11
    # Tokens before the first chunk may be linked, too.
    assert found(LinkedChunk(3, 10, 0, tuple(range(10)))) == 3
    assert found(LinkedChunk(0, 2, 0, (0, 1))) == 0
    assert found(LinkedChunk(0, 4, 0), LinkedChunk(9, 2, 0, (0, 1))) == 4


@pytest.mark.parametrize(("length", "count"), [(0, 1), (1, 0), (9, 1)])
def test_invalid_selections_are_refused(length: int, count: int) -> None:
    Selection("chunks", 8, (1, 2), (), 3).check(10)
    with pytest.raises(ValueError, match=f"{count} tokens of a chunk of {length} tokens after"):
        Selection("chunks", length, (1, 2), (), count).check(10)
