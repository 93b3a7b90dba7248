"""Splitting of documents: no text is lost, and no part exceeds the requested size."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sgl_ext.chunks import split as splitting
from sgl_ext.chunks.split import Split
from sgl_ext.errors import ExtError

DOCUMENT = """\
# Bears

A bear met a fox at the river.  They talked until night.

The fox went home.\r\nThe bear stayed.

## Where they live

| bear  | forest |
|-------|--------|
| brown | any    |

```python
def den(bear):
    return bear.home
```

* In caves,
* and under trees 🌲, höhlen, 洞穴.

# Foxes

They live everywhere.   \n\n\n"""


def split(whole: Any, how: Split, tokenizer: Any) -> list[Any]:
    return list(chain.from_iterable(splitting.split(whole, how, tokenizer)))


class Letters:
    """A tokenizer whose tokens are the bytes of the text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def joined(parts: list[Any]) -> Any:
    return "".join(parts) if isinstance(parts[0], str) else list(chain.from_iterable(parts))


def test_split_by_none_returns_the_whole_as_one_part() -> None:
    assert split("a text", Split(), Letters()) == ["a text"]
    assert split((3, 1, 2), Split(by="none"), Letters()) == [[3, 1, 2]]


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_split_by_tokens_keeps_the_token_ids_of_the_whole(tokenizer: Any, size: int) -> None:
    ids = tokenizer.encode(DOCUMENT, add_special_tokens=False)
    assert len(ids) > 100
    how = Split(by="tokens", tokens=size)
    parts = split(DOCUMENT, how, tokenizer)
    assert joined(parts) == ids
    assert {len(part) for part in parts[:-1]} <= {size}
    assert 0 < len(parts[-1]) <= size
    assert split(ids, how, tokenizer) == parts


@pytest.mark.parametrize("by", ["paragraph", "markdown"])
@pytest.mark.parametrize("size", [8, 20, 64, 10_000])
def test_text_parts_concatenate_to_the_whole_and_fit(tokenizer: Any, by: Any, size: int) -> None:
    parts = split(DOCUMENT, Split(by=by, tokens=size), tokenizer)
    assert "".join(map(str, parts)) == DOCUMENT
    lengths = [len(tokenizer.encode(part, add_special_tokens=False)) for part in parts]
    assert min(lengths) > 0
    assert max(lengths) <= size
    assert (len(parts) == 1) == (size == 10_000)


def test_paragraphs_are_joined_until_a_part_is_full() -> None:
    text = "One. Two.\n\nThree. Four.\n\n\nFive."
    # Empty lines between two paragraphs may end one part or begin the next.
    assert split(text, Split(by="paragraph", tokens=25), Letters()) == [
        "One. Two.\n\nThree. Four.",
        "\n\n\nFive.",
    ]
    assert split(text, Split(by="paragraph", tokens=13), Letters()) == [
        "One. Two.\n\n",
        "Three. Four.",
        "\n\n\nFive.",
    ]


def test_markdown_keeps_sections_together() -> None:
    text = "# A\n\nab\n\ncd\n\n# B\n\nef\n"
    sections = ["# A\n\nab\n\ncd\n\n", "# B\n\nef\n"]
    assert split(text, Split(by="markdown", tokens=18), Letters()) == sections
    assert split(text, Split(by="paragraph", tokens=18), Letters()) != sections


class Counting(Letters):
    """Tokenizer that counts the characters that it tokenizes."""

    read = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.read += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("by", ["paragraph", "markdown"])
@pytest.mark.parametrize("unit", ["x", "a ", "\n", "# a\n\nbc. d\n"])
def test_tokenized_characters_grow_linearly_with_the_length(by: Any, unit: str) -> None:
    how = Split(by=by, tokens=64)
    short, long = Counting(), Counting()
    split(unit * (25_000 // len(unit)), how, short)
    split(unit * (100_000 // len(unit)), how, long)
    assert long.read < 6 * short.read


@pytest.mark.parametrize("by", ["paragraph", "markdown"])
def test_windowed_split_of_a_long_text_equals_the_whole_split(tokenizer: Any, by: Any) -> None:
    whole = "\n".join(f"## {at}\n\n{DOCUMENT.replace('bear', f'bear {at}')}" for at in range(110))
    assert len(whole) > 2 * splitting._WINDOW
    kind = splitting.TextSplitter if by == "paragraph" else splitting.MarkdownSplitter

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    expected = kind.from_callback(length, 64, trim=False).chunks(whole)
    assert split(whole, Split(by=by, tokens=64), tokenizer) == expected


@given(
    text=st.text(st.sampled_from("ab .!\n\r\t#*|`-1>_[]()é洞🌲\u200d\ufeff\x00\u2028"), min_size=1),
    by=st.sampled_from(["tokens", "paragraph", "markdown"]),
    size=st.integers(4, 40),
)
def test_parts_of_any_text_are_complete_and_fit(text: str, by: Any, size: int) -> None:
    parts = split(text, Split(by=by, tokens=size), Letters())
    assert joined(parts) == (list(text.encode()) if by == "tokens" else text)
    for part in parts:
        assert 0 < len(part.encode() if isinstance(part, str) else part) <= size


@pytest.mark.parametrize(
    ("whole", "how", "message"),
    [
        ("", {}, "cannot split an empty text"),
        ("", {"by": "markdown", "tokens": 8}, "cannot split an empty text"),
        ([], {"by": "tokens", "tokens": 8}, "cannot split an empty text"),
        ("a", {"by": "none", "tokens": 8}, "does not split, but tokens is 8"),
        ("a", {"by": "tokens"}, "split by tokens requires tokens, the maximum.*found None"),
        ("a", {"by": "paragraph", "tokens": 0}, "split by paragraph requires.*found 0"),
        ("a", {"by": "markdown", "tokens": -3}, "found -3"),
        ("a", {"by": "tokens", "tokens": 1 << 70}, "1 to 16777216; found 11805"),
        ([1, 2], {"by": "paragraph", "tokens": 8}, "requires text, but token ids were given"),
        ("so 🌲", {"by": "paragraph", "tokens": 3}, "'🌲' takes 4 tokens.*tokens, which is 3"),
    ],
)
def test_input_that_cannot_be_split_is_refused(
    whole: Any, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExtError, match=message):
        split(whole, Split(**how), Letters())


@pytest.mark.parametrize(
    "how", [{"by": "page"}, {"by": "tokens", "tokens": "many"}, {"by": "tokens", "tokens": True},
            {"by": "tokens", "token": 8}],
)  # fmt: skip
def test_invalid_split_parameters_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Split.model_validate(how)
