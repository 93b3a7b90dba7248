"""Linked chunks in an engine: answers, reports, other tiers, and state after failures.

A chunk that is linked where it was computed gives the answers of SGLang without links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_kit import CHECKED, run_program
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.chunks.composition import Composition, LinkedChunk, path_of
from sgl_ext.engine.chunks.report import report

PROGRAM = """
import asyncio, json, sys
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler

computed = []  # tokens of each forward that was carried out in rows

def probe(self, path, start=False):
    from sgl_ext.engine.core import runtime
    from sgl_ext.engine.step import rows
    from sgl_ext.config import Chunks
    from sgl_ext.engine.chunks.power import ChunksPower
    ext = runtime.current
    if start:
        power = ChunksPower(ext.config, Chunks(link="always"))
        power.open(ext, self)
        ext.add(power)
        split = rows.split

        def counting(batch, parts):
            computed.append(sum(row.end - row.start for row in parts))
            return split(batch, parts)

        rows.split = counting
    self.token_to_kv_pool_allocator.groups.check_integrity()
    held = ext.chunks.links._requests
    json.dump({"computed": computed, "plans": len(ext.plans), "held": len(held),
               "protected": self.tree_cache.protected_size(),
               "pinned": ext.tiers and ext.tiers.stack.host._pinned
               - sum(map(len, ext.tiers.stack._demotions.pinned)),
               "hits": ext.tiers and ext.tiers.stack.hits["host"]}, open(path, "w"))
    computed.clear()

# Schedulers import this file before their arguments arrive.
Scheduler.probe = probe

def main():
    model, page, chunk, pool, state, config, options, script = json.load(open(sys.argv[1]))
    engine = Engine(model_path=model, page_size=page, max_total_tokens=pool, dtype="float32",
                    log_level="warning", chunked_prefill_size=chunk, enable_ext=True,
                    skip_tokenizer_init=True,
                    ext_config=config, **options)
    engine.collective_rpc("probe", path=state, start=True)

    async def ask(step):
        manager = engine.tokenizer_manager
        if "flush" in step:
            return (await manager.flush_cache()).success
        if "abort_after" in step:
            loop = asyncio.get_running_loop()
            loop.call_later(step["abort_after"], manager.abort_request, step["rid"])
        request = GenerateReqInput(
            rid=step.get("rid"),
            input_ids=step["ids"], extra_key=step.get("extra_key"), return_logprob=True,
            sampling_params={"temperature": 0, "max_new_tokens": step.get("new", 6),
                             "ignore_eos": True,
                             "custom_params": step.get("custom_params")})
        async for answer in manager.generate_request(request):
            meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return "aborted"
        return [answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]],
                meta["cached_tokens"], meta.get("ext")]

    async def together(steps):
        return await asyncio.gather(*map(ask, steps))

    for steps in script:
        answers = engine.loop.run_until_complete(together(steps))
        engine.collective_rpc("probe", path=state)
        print(json.dumps({"answers": answers, **json.load(open(state))}), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""

Step = dict[str, Any]


def play(
    script: list[list[Step]],
    model: Path,
    page: int,
    chunk: int,
    tmp_path: Path,
    *,
    pool: int = 6000,
    config: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    **options: object,
) -> list[Step]:
    """Returns the engine's answers to each group of requests, and its state after the group."""
    asked = [str(model), page, chunk, pool, str(tmp_path / "state"), config or {}, options, script]
    return run_program(tmp_path, PROGRAM, asked, environment=CHECKED | dict(environment or {}))[0]


@pytest.fixture(scope="module")
def texts(model: Path) -> list[list[int]]:
    """Returns the token ids of real texts, at most 300 of each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer(text)["input_ids"][:300] for text in sharegpt_prompts(6, characters=(1500, 4000))
    ]


def linked(
    ids: list[int], chunks: list[LinkedChunk], preparations: list[list[int]], name: str
) -> Step:
    composition = Composition("test", "chunks", tuple(map(tuple, preparations)), tuple(chunks))
    params = {"ext_composition": msgspec.to_builtins(composition)}
    return {"ids": ids, "extra_key": f"{composition.extra_key}:{name}", "custom_params": params}


def same(one: Step, other: Step) -> None:
    """Asserts that two answers have the same tokens and nearly the same logprobs.

    The number of tokens in a matrix product may change logprobs slightly.
    """
    ids, logprobs, *_ = one["answers"][0]
    other_ids, other_logprobs, *_ = other["answers"][0]
    assert ids == other_ids
    assert logprobs == pytest.approx(other_logprobs, abs=1e-4)


@dataclass(frozen=True)
class Run:
    """Answers of an engine with one page size by the name of the step, and parts of the prompts."""

    page: int
    prefix: list[int]
    first: list[int]
    second: list[int]
    question: list[int]
    answers: dict[str, Step]


@pytest.fixture(scope="module", params=[(1, 4096), (16, 256)])
def run(
    request: pytest.FixtureRequest,
    model: Path,
    texts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    page, chunk = request.param
    prefix, first, second, question = texts[0][:50], texts[1], texts[2], texts[3][:40]
    prompt, both = prefix + first + question, prefix + second + first + question
    head, moved = len(prefix), len(prefix) + len(second)
    whole = [LinkedChunk(head, len(first), 0)]
    everything = tuple(range(len(first)))
    next_turn = prompt + question + [5, 6, 7]
    added = prompt + question + second + question
    more = [*whole, LinkedChunk(len(prompt + question), len(second), 0)]

    def selecting(name: str, blend: int = 0, query: int = 0) -> Step:
        two = [
            LinkedChunk(head, len(second), 0, (), blend, query),
            LinkedChunk(moved, len(first), 0, (), blend, query),
        ]
        return linked(both, two, [prefix], name)

    mixed = [
        LinkedChunk(head, len(second), 0, (), 15),
        LinkedChunk(moved, len(first), 0, (3, 4), 0, 15),
    ]

    script: dict[str, list[Step]] = {
        "stock": [{"ids": prompt, "extra_key": "stock"}],
        "stock of both": [{"ids": both, "extra_key": "stock"}],
        "chunks": [
            {"ids": list(path_of(prefix, text, page)), "extra_key": "chunks", "new": 0}
            for text in (first, second)
        ],
        "here": [linked(prompt, whole, [prefix], "a")],
        "next turn": [linked(next_turn, whole, [prefix], "a")],
        "next turn alone": [linked(next_turn, whole, [prefix], "b")],
        "added": [linked(added, more, [prefix], "a")],
        "added alone": [linked(added, more, [prefix], "b2")],
        "recomputed": [
            linked(both, [LinkedChunk(moved, len(first), 0, everything)], [prefix], "c")
        ],
        "absent": [linked(both, [LinkedChunk(head, len(second), 0)], [[9, 9]], "d")],
        "naive": [selecting("e")],
        "blended": [selecting("f", blend=15)],
        "nearly all blended": [selecting("g", blend=99)],
        "queried": [selecting("j", query=50)],
        "nearly all queried": [selecting("k", query=99)],
        "mixed": [linked(both, mixed, [prefix], "l")],
        "together": [
            selecting("h", blend=15),
            {"ids": both, "extra_key": "plain"},
            selecting("i"),
            selecting("m", query=50),
        ],
    }
    answers = play(
        [*script.values()], model, page, chunk, tmp_path_factory.mktemp("run"), pool=8000
    )
    named = dict(zip(script, answers, strict=True))
    return Run(page, prefix, first, second, question, named)


def test_a_chunk_linked_where_it_was_computed_is_exact(run: Run) -> None:
    here = run.answers["here"]
    same(here, run.answers["stock"])
    assert sum(here["computed"]) == len(run.prefix) + len(run.question)


def test_the_next_turn_hits_the_linked_prefix(run: Run) -> None:
    next_turn = run.answers["next turn"]
    prompt = len(run.prefix) + len(run.first) + len(run.question)
    assert next_turn["answers"][0][2] >= prompt // run.page * run.page
    same(next_turn, run.answers["next turn alone"])


def test_a_turn_that_adds_a_chunk_reuses_the_turn_before(run: Run) -> None:
    added, alone = run.answers["added"], run.answers["added alone"]
    same(added, alone)
    (told,) = added["answers"][0][3]
    (of_alone,) = alone["answers"][0][3]
    prompt = len(run.prefix) + len(run.first) + len(run.question)
    # "next turn" has the same composition and continues with the question, too.
    assert told["prefix"] == (prompt + len(run.question)) // run.page * run.page
    assert (told["linked"], told["missing"]) == (len(run.second), 0)
    assert of_alone["linked"] == len(run.first) + len(run.second)
    assert sum(added["computed"]) < sum(alone["computed"]) - len(run.question)


@pytest.mark.parametrize("name", ["recomputed", "absent"])
def test_tokens_that_are_not_linked_are_computed(run: Run, name: str) -> None:
    found = run.answers[name]
    same(found, run.answers["stock of both"])
    prompt = len(run.prefix) + len(run.second) + len(run.first) + len(run.question)
    assert sum(found["computed"]) == prompt


@pytest.mark.parametrize(("name", "percent"), [("blended", 15), ("queried", 50)])
def test_a_selected_share_is_recomputed_and_reduces_the_error(
    run: Run, name: str, percent: int
) -> None:
    stock = run.answers["stock of both"]
    far, near, nearest = (
        distance(run.answers[each], stock) for each in ("naive", name, f"nearly all {name}")
    )
    whole = name == "blended" or run.page == 1  # else a forward cannot compute all selected tokens
    if whole:
        assert nearest < near < far
    chunks, rest = len(run.first) + len(run.second), len(run.prefix) + len(run.question)
    share = percent * chunks // 100
    (told,) = run.answers[name]["answers"][0][3]
    assert told["missing"] == 0
    assert told["linked"] + told["recomputed"] == chunks
    assert told["recomputed"] == (share if whole else 256 - 16 - len(run.question))
    if run.page == 1:  # the prompt is one chunk of the prefill
        # First all tokens, in the first layers, or what selects; then the rest and the share.
        first = chunks + rest if name == "blended" else rest
        assert sum(run.answers[name]["computed"]) == first + rest + share


def test_chunks_of_one_prompt_may_select_in_two_ways(run: Run) -> None:
    (told,) = run.answers["mixed"]["answers"][0][3]
    naive, stock = run.answers["naive"], run.answers["stock of both"]
    assert told["recomputed"] >= 15 * len(run.first) // 100
    assert distance(run.answers["mixed"], stock) < distance(naive, stock)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True),
    st.lists(st.sampled_from([0, 3, 16]), min_size=12, max_size=12),
    st.integers(0, 600),
)
def test_reported_numbers_of_tokens_add_up(
    lengths: list[int], amounts: list[int], prefix: int
) -> None:
    """Covers any cached prefix: after a retraction, it may be longer than the prompt."""
    chunks, at = [], 5
    for length, amount in zip(lengths, amounts, strict=False):
        recompute = tuple(range(min(amount, length + 1)))
        blend, query = (15, 0) if amount == 0 else (0, 15 if amount == 3 else 0)
        chunks.append(LinkedChunk(at, length + 1, 0, recompute, blend, query))
        at += length + 3
    composition = Composition("any", "ns", ((),), tuple(chunks))
    every = [[range(chunk.length)] for chunk in chunks]
    plan = composition.plan(at + 7, every, [range(4)])
    told = report(composition, plan, prefix)
    numbers = [told["linked"], told["recomputed"], told["missing"], told["prefix"]]
    assert min(numbers) >= 0
    assert told["missing"] == 0
    behind = sum(max(one.at + one.length - max(one.at, prefix), 0) for one in chunks)
    assert told["linked"] + told["recomputed"] == behind
    none = report(composition, composition.plan(at + 7, [[]] * len(chunks)), prefix)
    assert none["linked"] == 0
    assert none["recomputed"] + none["missing"] == behind


def test_a_batch_can_mix_requests_of_all_methods_and_plain_ones(run: Run) -> None:
    names = ("blended", "stock of both", "naive", "queried")
    for found, name in zip(run.answers["together"]["answers"], names, strict=True):
        ids, logprobs, *_ = run.answers[name]["answers"][0]
        assert found[0] == ids
        assert found[1] == pytest.approx(logprobs, abs=1e-3)


def test_finished_requests_leave_no_state(run: Run) -> None:
    for each in run.answers.values():
        assert (each["plans"], each["held"], each["protected"]) == (0, 0, 0)


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_chunks_evicted_from_the_device_are_linked_from_other_tiers(
    tier: str, model: Path, texts: list[list[int]], tmp_path: Path
) -> None:
    page = 16
    prefix, first, second, question = texts[0][:50], texts[1], texts[2], texts[3][:40]
    prompt = prefix + second + first + question
    chunks = [
        LinkedChunk(len(prefix), len(second), 0, tuple(range(len(second)))),
        LinkedChunk(len(prefix) + len(second), len(first), 1),
    ]
    preparations = [[], prefix + second]
    # An SSD tier leaves out pages for which its disk is too busy or too slow at the moment.
    rounds = 1 if tier == "host" else 3
    script: list[list[Step]] = [[{"ids": prompt, "extra_key": "stock"}]]
    for again in range(rounds):
        name = f"user-{again}"
        prepare = {"ids": list(path_of(preparations[1], first, page)), "extra_key": "chunks"}
        script += [
            [{"ids": [*prefix, 1], "extra_key": name, "new": 1}],
            [prepare | {"new": 0}],
            *([{"ids": [number, *texts[4] * 3], "new": 1}] for number in range(3)),
            [linked(prompt, chunks, preparations, name)],
        ]
    (tmp_path / "ssd").mkdir()
    ssd = {"directories": [str(tmp_path / "ssd")], "capacity": "2GiB", "keep_after": 1}
    tiers = {
        "host": {"host": {"capacity": "128MiB"}},
        # More than one request needs, and less than the requests that flood the device.
        "ssd": {"ssd": ssd, "staging": "64MiB"},
    }
    config = {"tiers": tiers[tier]}
    answers = play(script, model, page, 4096, tmp_path, pool=2000, config=config)
    lead = len(prefix) // page * page
    told = []
    for found in answers[6::6]:
        same(found, answers[0])
        told += found["answers"][0][3]
        assert sum(found["computed"]) == len(prompt) - told[-1]["linked"] - told[-1]["prefix"]
        assert (found["plans"], found["held"], found["protected"]) == (0, 0, 0)
        assert found["pinned"] == 0
    assert len(told) == rounds
    assert (len(first), 0, lead) in [(one["linked"], one["missing"], one["prefix"]) for one in told]
    if tier == "host":
        start = len(preparations[1])
        of_chunk = -(-(start + len(first)) // page) - start // page
        assert found["hits"] == of_chunk + lead // page


def test_chunks_on_a_slow_ssd_are_partly_computed_while_the_rest_loads(
    model: Path, texts: list[list[int]], tmp_path: Path
) -> None:
    """Links a chunk at the position that it was computed at, in parts of any size."""
    page = 16
    prefix, text, question = texts[0][:50], [*chain(*texts[1:5])][:1000], texts[5][:40]
    prompt, whole = prefix + text + question, [LinkedChunk(len(prefix), len(text), 0)]
    prepare = {"ids": list(path_of(prefix, text, page)), "extra_key": "chunks", "new": 0}
    script: list[list[Step]] = [[{"ids": prompt, "extra_key": "stock"}]]
    for again in range(3):
        script += [
            [prepare],
            *([{"ids": [number, *texts[4] * 5], "new": 1}] for number in range(2)),
            [linked(prompt, whole, [prefix], f"user-{again}")],
        ]
    (tmp_path / "ssd").mkdir()
    ssd = {
        "directories": [str(tmp_path / "ssd")], "capacity": "2GiB", "keep_after": 1,
        "emulate": {"bytes_per_second": "40MB"},
    }  # fmt: skip
    config = {"tiers": {"ssd": ssd, "staging": "16MiB"}, "restore": {"chunk": 128}}
    answers = play(script, model, page, 256, tmp_path, pool=2000, config=config)
    parts = []
    for found in answers[4::4]:
        same(found, answers[0])
        assert (found["plans"], found["held"], found["protected"]) == (0, 0, 0)
        told = {one["power"]: one for one in found["answers"][0][3]}
        copied, computed = told["chunks"]["linked"], told["chunks"]["computed"]
        assert (copied + computed, told["chunks"]["missing"]) == (len(text), 0)
        parts.append((copied, computed))
    assert any(min(each) > 0 for each in parts), parts


def test_retracted_aborted_and_flushed_requests_leave_no_state(
    model: Path, texts: list[list[int]], tmp_path: Path
) -> None:
    """Retracts requests, aborts requests between the parts of their prefill, and flushes chunks.

    Other requests decode in the same batches meanwhile.
    """
    prefix, first, second, question = texts[0][:50], texts[1], texts[2], texts[3][:40]
    prompt = prefix + first + question
    whole = [LinkedChunk(len(prefix), len(first), 0)]
    several = prefix + second + question + first + texts[4] + texts[5]
    chunks = [
        LinkedChunk(len(prefix), len(second), 0, tuple(range(0, len(second), 2)), 15),
        LinkedChunk(len(prefix + second + question), len(first), 0, (), 15),
    ]
    long = {"new": 30}
    prepare = [
        {"ids": list(path_of(prefix, text, 16)), "extra_key": "chunks", "new": 0}
        for text in (first, second)
    ]
    aborted = [
        linked(several, chunks, [prefix], f"a{number}")
        | {"rid": f"aborted-{number}", "abort_after": 0.03 * 2**number}
        for number in range(5)
    ]
    answers = play(
        [
            [{"ids": prompt, "extra_key": "stock", **long}],
            prepare,
            [
                {"ids": several, **long},  # the others arrive while it runs
                linked(prompt, whole, [prefix], "one") | long,
                linked(several, chunks, [prefix], "two") | long,
                linked(prompt, whole, [prefix], "three") | long,
                linked(prompt, whole, [prefix], "four") | long,
            ],
            aborted,
            [{"flush": True}],
            [linked(prompt, whole, [prefix], "five") | long],
        ],
        model,
        16,
        64,
        tmp_path,
        pool=4000,
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "17"},
        enable_mixed_chunk=True,
    )
    stock, _, retracted, given_up, flushed, alone = answers
    for number in (1, 3, 4):
        found = retracted["answers"][number]
        same({"answers": [found]}, stock)
        assert found[3][0]["linked"] == len(first)
    assert "aborted" in given_up["answers"]
    assert flushed["answers"] == [True]
    same(alone, stock)
    assert alone["answers"][0][3][0]["missing"] == len(first)
    for each in answers:
        assert (each["plans"], each["held"], each["protected"]) == (0, 0, 0)


def distance(one: Step, other: Step) -> float:
    """Returns the difference between the logprobs of the first tokens."""
    return float(abs(one["answers"][0][1][0] - other["answers"][0][1][0]))
