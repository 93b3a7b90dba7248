"""What chaos on real servers makes of what it sees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sgl_ext.bench.peer.chaos import EVENTS, STREAMS, shares
from sgl_ext.bench.peer.files import Files, leaked_files
from sgl_ext.bench.peer.questions import Answer, Call, Ending, Question, Tally, judge

RIGHT: Answer = [5, 6, 7], [-0.5, -1.0, -1.5]


def answer(ids: list[int], logprobs: list[float]) -> str:
    entries = [[logprob, id_, None] for logprob, id_ in zip(logprobs, ids, strict=True)]
    return json.dumps({"output_ids": ids, "meta_info": {"output_token_logprobs": entries}})


@pytest.mark.parametrize(
    ("status", "text", "ending"),
    [
        (200, answer([5, 6, 7], [-0.5, -1.0, -1.5004]), Ending.RIGHT),
        (200, answer([5, 6, 7], [-0.5, -1.0, -1.502]), Ending.WRONG),
        (200, answer([5, 6, 7], [-0.5, -1.0, float("nan")]), Ending.WRONG),
        (200, answer([5, 6, 8], [-0.5, -1.0, -1.5]), Ending.WRONG),
        (200, answer([5, 6], [-0.5, -1.0]), Ending.WRONG),
        (200, json.dumps({"output_ids": [], "meta_info": {}}), Ending.WRONG),
        (200, json.dumps({"output_ids": [5, 6, 7], "meta_info": {}}), Ending.WRONG),
        (503, "A peer has taken back what it lent. Retry later.", Ending.REFUSED),
        (503, "", Ending.WRONG),
        (400, "longer than the context. Retry later.", Ending.WRONG),
        (500, "", Ending.WRONG),
    ],
)
def test_an_answer_is_right_or_says_why_there_is_none(
    status: int, text: str, ending: Ending
) -> None:
    found, said = judge(status, text, RIGHT)
    assert found is ending
    assert bool(said) is (ending is not Ending.RIGHT)


def test_only_errors_that_a_round_explains_are_clean() -> None:
    tally = Tally()
    calls = [Call(ending, 1.0, "said") for ending in Ending]
    tally.add("master", calls, frozenset({Ending.CUT}))
    assert (tally.right, tally.wrong, tally.errors, tally.hangs) == (1, 2, 1, 1)
    tally.add("master", calls, frozenset())
    assert (tally.right, tally.wrong, tally.errors, tally.hangs) == (2, 5, 1, 2)
    assert len(tally.faults) == 7
    assert tally.faults[0] == "master: wrong after 1.0 s said"


OWN, SLAB, OTHER, GONE = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("master", "worker", "leaks"),
    [
        (Files({OWN: 10}, frozenset({OWN, SLAB})), Files({SLAB: 20}, frozenset({SLAB})), 0),
        # A part of what the worker has was replaced.
        (
            Files({OWN: 10}, frozenset({OWN, SLAB, OTHER})),
            Files({SLAB: 12, OTHER: 8}, frozenset({SLAB, OTHER})),
            0,
        ),
        # … of which the first one is kept.
        (
            Files({OWN: 10}, frozenset({OWN, OTHER})),
            Files({SLAB: 12, OTHER: 8, GONE: 8}, frozenset({SLAB, OTHER})),
            2,
        ),
        # A dead worker's memory is mapped.
        (Files({OWN: 10}, frozenset({OWN, GONE})), Files({SLAB: 20}, frozenset({SLAB})), 1),
        # … and open.
        (
            Files({OWN: 5, GONE: 5}, frozenset({OWN, SLAB, GONE})),
            Files({SLAB: 20}, frozenset({SLAB})),
            1,
        ),
    ],
)
def test_files_in_memory_belong_to_those_who_use_them(
    master: Files, worker: Files, leaks: int
) -> None:
    assert len(leaked_files(master, worker, 30)) == leaks


@pytest.mark.parametrize("rounds", [1, 3, 5, 7, 10, 11, 200])
def test_every_round_has_a_stream_and_few_have_one(rounds: int) -> None:
    found = list(shares(rounds))
    assert [number for _, numbers in found for number in numbers] == list(range(rounds))
    assert len(found) == (1 if rounds <= len(EVENTS) else len(STREAMS))
    for _, numbers in found:
        assert rounds < 2 * len(EVENTS) or len(numbers) >= len(EVENTS)


def test_a_question_has_room_for_more_than_it_is_answered() -> None:
    whole: dict[str, Any] = Question((1, 2), 12).body
    assert whole["sampling_params"]["ignore_eos"]
    ended = Question((1, 2), 4000, end=7).body["sampling_params"]
    # SGLang looks at no stop token where it ignores the model's own.
    assert "ignore_eos" not in ended
    assert ended["stop_token_ids"] == [7]
    assert ended["max_new_tokens"] == 4000
