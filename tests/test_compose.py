"""Text with contexts becomes token ids and a composition."""

from __future__ import annotations

import pytest

from sgl_ext.chunks.compose import compose, mark, marked
from sgl_ext.chunks.composition import LinkedChunk
from sgl_ext.chunks.contexts import Context, UnknownContextError

CONTEXTS = {
    "bare": Context("bare", None, (10, 11, 12, 13), "lego-2", (), (0, 1), 0, None, None),
    "primed": Context("primed", None, (20, 21), "primed+head-1", (7, 8, 9), (0,), 0, None, None),
}


def context_of(id_: str) -> Context:
    if id_ not in CONTEXTS:
        raise UnknownContextError(id_)
    return CONTEXTS[id_]


def tokenize(text: str, first: bool) -> list[int]:
    return ([1] if first else []) + [ord(letter) for letter in text]


def test_a_prompt_of_both() -> None:
    text = f"ab{mark('bare')}{mark('primed')}c{mark('bare')}d"
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


def test_a_bare_chunk_at_the_beginning_is_exact() -> None:
    prompt = compose(f"{mark('bare')}x", context_of=context_of, tokenize=tokenize, longest=99)
    assert prompt.tokens == [10, 11, 12, 13, 120]
    assert prompt.composition is not None
    assert prompt.composition.chunks == (LinkedChunk(0, 4, 0, ()),)


def test_namespaces_follow_from_what_is_linked_where() -> None:
    texts = [
        f"ab{mark('bare')}c",
        f"ab{mark('bare')}d",  # the same chunks in the same places
        f"a{mark('bare')}c",
        f"ab{mark('primed')}c",
        f"ab{mark('bare')}c{mark('primed')}d",
    ]
    prompts = [
        compose(text, context_of=context_of, tokenize=tokenize, longest=99) for text in texts
    ]
    names = [prompt.composition.extra_key for prompt in prompts if prompt.composition]
    assert names[0] == names[1]
    assert len(set(names)) == 4
    assert all(name.startswith("ext:link:") for name in names)


def test_an_earlier_turn_has_the_namespace_of_its_chunks() -> None:
    turns = [f"a{mark('primed')}b{mark('bare')}c", f"d{mark('primed')}e{mark('bare')}f"]
    first, both = (
        compose(text, context_of=context_of, tokenize=tokenize, longest=99).composition
        for text in (turns[0], "".join(turns))
    )
    assert first is not None
    assert both is not None
    assert both.until(2).extra_key == first.extra_key
    assert both.until(4) == both
    assert len({both.until(count).extra_key for count in range(1, 5)}) == 4


def test_text_alone_is_itself() -> None:
    prompt = compose("plain", context_of=context_of, tokenize=tokenize, longest=99)
    assert prompt.composition is None
    assert not marked("plain \ue0c0 \ue0c0 \ue0c1"[:-1])


def test_an_unknown_id_is_nobodys() -> None:
    with pytest.raises(UnknownContextError):
        compose(mark("other"), context_of=context_of, tokenize=tokenize, longest=99)


def test_the_last_token_of_a_prompt_is_computed() -> None:
    prompt = compose(f"a{mark('bare')}", context_of=context_of, tokenize=tokenize, longest=99)
    assert prompt.composition is not None
    assert prompt.composition.chunks == (LinkedChunk(2, 4, 0, (0, 1, 3)),)
    prompt.composition.check(len(prompt.tokens), prompt.composition.extra_key)
    alone = compose(mark("bare"), context_of=context_of, tokenize=tokenize, longest=99).composition
    assert alone is not None
    assert alone.chunks == (LinkedChunk(0, 4, 0, (3,)),)
