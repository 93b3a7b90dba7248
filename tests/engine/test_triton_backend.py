"""SGLang's Triton attention over both layouts and under the powers, interpreted on the CPU.

The kernels, strides and rows of a GPU return the tokens of the compiled CPU attention. Streams,
graphs and races are not covered. Chunks are approximate: the CPU attention links the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from forked import Template
from test_links import linked
from triton_kit import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    ROWS,
    VOCABULARY,
    Group,
    Run,
    Step,
    interpreting,
    make_model,
    play,
)  # fmt: skip

from sgl_ext.chunks.composition import LinkedChunk, path_of

LONG, POOL = 320, 384
"""Tokens of the prompt that is evicted and loaded, and of the device's memory."""
EXACT = ("alone", "next turn", "together")
TIERS = ("tiers", "restore by tokens", "restore by layers")
LINKED = ("linked", "holes", "blended", "queried", "linked from host memory")


def tokens(count: int, seed: int) -> list[int]:
    chance = Random(seed)  # noqa: S311
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


def exact() -> list[Group]:
    """Returns requests that any layout serves: alone, with a cached prefix, and in a batch."""
    alone = tokens(LONG, 0)
    both: list[Step] = [{"ids": tokens(90, 1)}, {"ids": tokens(33, 2)}]
    steps: list[list[Step]] = [[{"ids": alone}], [{"ids": alone + tokens(20, 3)}], both]
    return [(name, {}, asked) for name, asked in zip(EXACT, steps, strict=True)]


def powers(page: int) -> list[Group]:
    """Returns requests for the powers. Only linked chunks change answers."""
    long: list[Step] = [{"ids": tokens(LONG, 0) + tokens(9, 4)}]
    prefix, first, second, question = (tokens(size, size) for size in (20, 70, 50, 14))
    moved = len(prefix) + len(second)

    def asked(name: str, recompute: tuple[int, ...], blend: int = 0, query: int = 0) -> Step:
        chunks = [
            LinkedChunk(len(prefix), len(second), 0, recompute, blend, query),
            LinkedChunk(moved, len(first), 0, recompute, blend, query),
        ]
        return linked(prefix + second + first + question, chunks, [prefix], name)

    chunks: list[Step] = [
        {"ids": list(path_of(prefix, text, page)), "extra_key": "chunks", "new": 0}
        for text in (first, second)
    ]
    # The second one streams its token when the first one has been prefilled; then comes the third.
    preempted: list[Step] = [
        {"ids": tokens(200, 6), "new": 14},
        {"ids": tokens(5, 8), "new": 1, "stream": True},
        {"ids": tokens(200, 7), "new": 2, "urgent": True},
    ]
    return [
        ("tiers", {"evict": True, "host": "never"}, long),
        ("restore by tokens", {"evict": True, "host": "tokens"}, long),
        ("restore by layers", {"evict": True, "host": "layers"}, long),
        ("rows", {"evict": True, "host": "never"}, [{"ids": tokens(70, 9), "rid": ROWS}]),
        ("chunks", {}, chunks),
        ("linked", {}, [asked("a", ())]),
        ("holes", {}, [asked("b", (0, 1, 9, 17, 18)), {"ids": tokens(40, 8)}]),
        ("blended", {}, [asked("c", (), 15)]),
        ("queried", {}, [asked("e", (), query=15)]),
        ("linked from host memory", {"evict": True}, [asked("d", (0, 1))]),
        ("swap", {"evict": True}, preempted),
        ("end", {}, []),
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Template]:
    process = interpreting()
    yield process
    process.close()


@pytest.fixture(scope="module")
def expected(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Answers of the compiled CPU attention with chunks, without other powers or evictions."""
    options = {"page_size": 16, "max_total_tokens": 8192}
    folder = tmp_path_factory.mktemp("expected")
    (run,) = play(small, [(options, exact() + powers(16))], folder)
    assert {each["backend"] for each in run.values()} == {"CpuAttnBackend"}
    return run


@dataclass(frozen=True)
class Runs:
    """Answers of Triton's attention over the slab with all powers, and over SGLang's pool."""

    page: int
    slab: Run
    layers: Run


@pytest.fixture(scope="module", params=[1, 16])
def runs(
    request: pytest.FixtureRequest,
    small: Path,
    interpreted: Template,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    page = request.param
    host = {"capacity": "64MiB", "emulate": {"bytes_per_second": "4MiB"}}
    swap = {"capacity": "16MiB", "policy": "static"}
    tiered = {"tiers": {"host": host}, "restore": {"chunk": 128}, "swap": swap}
    options = {
        "page_size": page, "max_total_tokens": POOL, "attention_backend": "triton",
        "triton_attention_num_kv_splits": 1,
    }  # fmt: skip
    own = {"memory": {"layout": "layer_major"}}
    both = [
        (options | {"ext_config": tiered}, exact() + powers(page)),
        (options | {"ext_config": own}, exact()),
    ]
    folder = tmp_path_factory.mktemp(f"page-{page}")
    found = play(small, both, folder, template=interpreted, environment={"TRITON_INTERPRET": "1"})
    return Runs(page, *found)


def same(found: Step, expected: Step) -> None:
    """Asserts that answers have equal tokens, and logprobs that agree within 1e-4."""
    for ours, theirs in zip(found["answers"], expected["answers"], strict=True):
        assert ours["ids"] == theirs["ids"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)


def told(step: Step, power: str) -> list[Step]:
    entries = [entry for answer in step["answers"] for entry in answer["ext"]]
    return [entry for entry in entries if entry["power"] == power]


def test_interpreted_kernels_read_strided_views_of_the_slab(runs: Runs) -> None:
    heads = KV_HEADS * HEAD_DIM
    for run, stride in ((runs.slab, 2 * LAYERS * heads), (runs.layers, heads)):
        for each in run.values():
            assert each["backend"] == "TritonAttnBackend"
            assert each["kernels"] == ["InterpretedFunction"] * 2
            assert each["strides"] == [stride, HEAD_DIM, 1]


@pytest.mark.parametrize("layout", ["slab", "layers"])
@pytest.mark.parametrize("name", EXACT)
def test_both_layouts_give_the_answers_of_the_cpu_attention(
    name: str, layout: str, runs: Runs, expected: Run
) -> None:
    found = getattr(runs, layout)[name]
    same(found, expected[name])
    if name == "next turn":
        assert found["answers"][0]["cached"]["device"] == LONG


@pytest.mark.parametrize("name", TIERS)
def test_evicted_kv_is_loaded_and_restored(name: str, runs: Runs, expected: Run) -> None:
    found = runs.slab[name]
    same(found, expected[name])
    cached = found["answers"][0]["cached"]
    pages = LONG // runs.page * runs.page
    if name == "tiers":
        assert cached == {"device": 0, "host": cached["host"]}
        assert cached["host"] >= pages
        assert found["live"]["tiers"]["host"]["hit_tokens"] == cached["host"]
        return
    (entry,) = told(found, "restore")
    assert entry["computed"] + entry["loaded"]["host"] >= pages
    assert min(entry["computed"], entry["loaded"]["host"]) > 0
    assert cached["host"] == entry["loaded"]["host"]
    assert (found["split"]["between layers"] > 0) == (name == "restore by layers")


def test_rows_that_alias_one_request_equal_a_whole_prefill(runs: Runs, expected: Run) -> None:
    """Uses more rows than --max-running-requests allows requests."""
    found = runs.slab["rows"]
    same(found, expected["rows"])
    assert (found["split"]["rows"], found["split"]["aliased"]) == (10, 9)
    assert expected["rows"]["split"]["rows"] == 0


@pytest.mark.parametrize("name", LINKED)
def test_linked_chunks_equal_those_of_the_cpu_attention(
    name: str, runs: Runs, expected: Run
) -> None:
    found = runs.slab[name]
    same(found, expected[name])
    (entry,) = told(found, "chunks")
    (theirs,) = told(expected[name], "chunks")
    assert entry == theirs
    assert entry["missing"] == 0
    assert entry["linked"] >= 100
    assert found["split"]["aliased"] == found["split"]["holes"] > 0
    assert found["split"]["holes"] == expected[name]["split"]["holes"]
    assert (found["split"]["between layers"] > 0) == (name == "blended")
    # Each way of linking gives another approximation, so that equal answers say something.
    logprobs = [expected[each]["answers"][0]["logprobs"][0] for each in LINKED]
    assert all(abs(one - logprobs[0]) > 1e-2 for one in logprobs[1:])


def test_a_preempted_request_is_swapped(runs: Runs, expected: Run) -> None:
    """Uses two requests that do not fit the device's memory together."""
    found = runs.slab["swap"]
    same(found, expected["swap"])
    (entry,) = told(found, "swap")
    assert entry["times"] >= 1
    counts = found["live"]["swap"]
    assert (counts["swapped_in"], counts["recomputed_tokens"]) == (entry["times"], 0)
    assert counts["loaded_pages"] > 0


def test_ended_requests_leave_nothing(runs: Runs) -> None:
    end = runs.slab["end"]
    assert (end["protected"], end["plans"], end["live"]["swap"]["swapped"]) == (0, 0, 0)
