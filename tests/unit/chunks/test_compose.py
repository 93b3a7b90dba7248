"""Composition of text with context marks into token ids and linked chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_ext.chunks.compose import compose
from sgl_ext.chunks.composition import LinkedChunk
from sgl_ext.chunks.contexts import Context
from sgl_ext.errors import ExtError, UnknownContextError
from sgl_ext.marks import ids_in, mark, marked

CONTEXTS = {
    id_: Context(id_, None, tokens, method, before, recompute, 0, None, None)
    for id_, tokens, method, before, recompute in (
        ("ctx-bare", (10, 11, 12, 13), "lego-2", (), (0, 1)),
        ("ctx-late", (30, 31, 32), "primed", (7,), (2,)),
        ("ctx-primed", (20, 21), "primed+head-1", (7, 8, 9), (0,)),
    )
}


def context_of(id_: str) -> Context:
    if id_ not in CONTEXTS:
        raise UnknownContextError(id_)
    return CONTEXTS[id_]


def tokenize(text: str, first: bool) -> list[int]:
    return ([1] if first else []) + [ord(letter) for letter in text]


def test_text_and_contexts_become_tokens_and_linked_chunks() -> None:
    text = f"ab{mark('ctx-bare')}{mark('ctx-primed')}c{mark('ctx-bare')}d"
    assert marked(text)
    prompt = compose(text, context_of=context_of, tokenize=tokenize, longest=99)
    expected = [1, 97, 98, 10, 11, 12, 13, 20, 21, 99, 10, 11, 12, 13, 100]
    assert prompt.tokens == expected
    assert prompt.composition is not None
    prompt.composition.check(len(prompt.tokens), prompt.composition.extra_key)
    assert prompt.composition.preparations == ((), (7, 8, 9))
    assert prompt.composition.chunks == (
        LinkedChunk(3, 4, 0, (0, 1)),
        LinkedChunk(7, 2, 1, (0,)),
        LinkedChunk(10, 4, 0, (0, 1)),
    )
    assert prompt.composition.method == "lego-2/primed+head-1"


def without_bos(text: str, _first: bool) -> list[int]:
    return tokenize(text, False)


def test_a_chunk_without_prefix_is_exact_at_the_beginning() -> None:
    text = f"{mark('ctx-bare')}x"
    prompt = compose(text, context_of=context_of, tokenize=without_bos, longest=99)
    assert prompt.tokens == [10, 11, 12, 13, 120]
    assert prompt.composition is not None
    assert prompt.composition.chunks == (LinkedChunk(0, 4, 0, ()),)


def test_a_leading_chunk_follows_bos_or_recomputes_its_first_token() -> None:
    text = f"{mark('ctx-bare')}x"
    prompt = compose(text, context_of=context_of, tokenize=tokenize, longest=99)
    assert prompt.tokens == [1, 10, 11, 12, 13, 120]
    assert prompt.composition is not None
    assert prompt.composition.chunks == (LinkedChunk(1, 4, 0, (0, 1)),)
    # Without a BOS token, the first token of the chunk is recomputed.
    text = f"{mark('ctx-late')}x"
    prompt = compose(text, context_of=context_of, tokenize=without_bos, longest=99)
    assert prompt.composition is not None
    assert prompt.composition.chunks == (LinkedChunk(0, 3, 0, (0, 2)),)


def test_namespaces_depend_on_linked_chunks_and_their_positions() -> None:
    texts = [
        f"ab{mark('ctx-bare')}c",
        f"ab{mark('ctx-bare')}d",  # the same chunks in the same places
        f"a{mark('ctx-bare')}c",
        f"ab{mark('ctx-primed')}c",
        f"ab{mark('ctx-bare')}c{mark('ctx-primed')}d",
    ]
    prompts = [
        compose(text, context_of=context_of, tokenize=tokenize, longest=99) for text in texts
    ]
    names = [prompt.composition.extra_key for prompt in prompts if prompt.composition]
    assert names[0] == names[1]
    assert len(set(names)) == 4
    assert all(name.startswith("ext:link:") for name in names)


def test_questions_that_select_tokens_have_namespaces_of_their_own() -> None:
    query = Context("ctx-query", None, (10, 11), "query-15", (), (), 0, None, None, 15)
    other = replace(CONTEXTS["ctx-bare"], tokens=(14, 15, 16, 17))
    contexts = {**CONTEXTS, query.id: query, "ctx-other": other}
    texts = [
        f"ab{mark('ctx-query')}c",
        f"ab{mark('ctx-query')}d",
        f"ab{mark('ctx-query')}cd",  # a later turn asks something else
        f"ab{mark('ctx-query')}c{mark('ctx-bare')}d",
        f"ab{mark('ctx-query')}cc{mark('ctx-bare')}d",  # text between chunks
        f"ab{mark('ctx-query')}c{mark('ctx-other')}d",  # a chunk of other tokens
        f"ab{mark('ctx-query')}c",
    ]
    found = [
        compose(text, context_of=contexts.__getitem__, tokenize=tokenize, longest=99).composition
        for text in texts
    ]
    compositions = [each for each in found if each is not None]
    names = [each.extra_key for each in compositions]
    assert names[0] == names[-1]
    assert len({*names}) == 6
    assert compositions[3].until(1).extra_key not in names
    assert [chunk.query for chunk in compositions[3].chunks] == [15, 0]


def test_an_earlier_turn_has_the_namespace_of_its_chunks() -> None:
    turns = [f"{one}{mark('ctx-primed')}b{mark('ctx-bare')}c" for one in "ad"]
    first, both = (
        compose(text, context_of=context_of, tokenize=tokenize, longest=99).composition
        for text in (turns[0], "".join(turns))
    )
    assert first is not None
    assert both is not None
    assert both.until(2).extra_key == first.extra_key
    assert both.until(4) == both
    assert len({both.until(count).extra_key for count in range(1, 5)}) == 4


def test_text_without_marks_has_no_composition() -> None:
    prompt = compose("plain", context_of=context_of, tokenize=tokenize, longest=99)
    assert prompt.composition is None
    for other in ("\ue0c0ctx-a", "\ue0c0 \ue0c1", "\ue0c0\ue0c1", "\ue0c0ctx-é\ue0c1"):
        assert not marked(f"plain {other}")
        assert ids_in(other + mark("ctx-a") + mark("ctx-b")) == ["ctx-a", "ctx-b"]


def test_a_prompt_with_too_many_contexts_is_refused() -> None:
    most = 1000 * mark("ctx-bare") + "x"
    assert compose(most, context_of=context_of, tokenize=tokenize, longest=9999).composition
    text = 1001 * mark("ctx-bare")
    with pytest.raises(ExtError, match="more than 1000 contexts"):
        compose(text, context_of=context_of, tokenize=tokenize, longest=9999)


def test_an_unknown_context_raises() -> None:
    with pytest.raises(UnknownContextError):
        compose(mark("ctx-other"), context_of=context_of, tokenize=tokenize, longest=99)


def test_the_last_token_of_a_prompt_is_computed() -> None:
    prompt = compose(f"a{mark('ctx-bare')}", context_of=context_of, tokenize=tokenize, longest=99)
    assert prompt.composition is not None
    assert prompt.composition.chunks == (LinkedChunk(2, 4, 0, (0, 1, 3)),)
    prompt.composition.check(len(prompt.tokens), prompt.composition.extra_key)
    text = mark("ctx-bare")
    alone = compose(text, context_of=context_of, tokenize=without_bos, longest=99).composition
    assert alone is not None
    assert alone.chunks == (LinkedChunk(0, 4, 0, (3,)),)
