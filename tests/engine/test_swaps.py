"""Tests of swapping in an engine: preempted requests return the answers of undisturbed ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_kit import CHECKED, retracting, run_program

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.config.swap import EXPERIMENT

PROGRAM = """
import asyncio, json, random, sys, time
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sgl_ext.memory.tickets import TransferError
from sgl_ext.swap.manager import SwapManager

def probe(self, path):
    from sgl_ext.engine.core import runtime
    ext = runtime.current
    host, swap = ext.tiers.stack.host, ext.swap.manager
    self.token_to_kv_pool_allocator.groups.check_integrity()
    host.check_integrity()
    json.dump({"counts": vars(swap.counts), "swapped": len(swap._swapped),
               "used": swap._used, "pinned": host._pinned,
               "flying": ext.tiers.stack.in_flight.pending, "resuming": len(ext.swap.resuming),
               "dropped": len(ext.tiers.stack.stores._dropped), "lost": len(lost),
               "protected": self.tree_cache.protected_size(),
               "places": host.capacity - host.free - len(host),
               "decisions": ext.costs.decisions.describe()},
              open(path, "w"))

lost = []

class Lost:
    bytes_total, seconds = 0, 0.0

    def poll(self):
        return True

    def wait(self, timeout):
        raise TransferError(5, "a fault of the test's", 0, 0)

    def fence(self, stream, timeout):
        self.wait(timeout)

def load(self, swapped, blocks, original=SwapManager.load, calls=[0]):
    calls[0] += 1
    if calls[0] % 7:
        return original(self, swapped, blocks)
    lost.append(len(blocks))
    return [Lost()]

# Schedulers import this file before their arguments arrive.
Scheduler.probe = probe
SwapManager.load = load

def main():
    model, page, pool, options, config, requests, aborted, least, state = json.load(
        open(sys.argv[1]))
    ext = {"enable_ext": True, "ext_config": config} if config else {}
    waits = ("swapped", "used", "pinned", "flying", "resuming", "dropped", "protected", "places")

    async def ask(engine, request, abort_after=None):
        manager = engine.tokenizer_manager
        if abort_after is not None:
            rid = request["rid"] = f"aborted {abort_after}"
            asyncio.get_running_loop().call_later(abort_after, manager.abort_request, rid)
        seen = 0
        async for answer in manager.generate_request(GenerateReqInput(**request)):
            seen += 1
        answers = answer if isinstance(answer, list) else [answer]
        def logprobs(meta, key):
            return [entry[0] for entry in meta.get(key) or ()]

        return [{"text": each["text"], "seen": seen,
                 "out": logprobs(each["meta_info"], "output_token_logprobs"),
                 "prompt": logprobs(each["meta_info"], "input_token_logprobs"),
                 "why": each["meta_info"]["finish_reason"]["type"],
                 "ext": each["meta_info"].get("ext") or []} for each in answers]

    async def together(engine, requests):
        return await asyncio.gather(*(ask(engine, request) for request in requests))

    async def disturbed(engine, requests, aborted):
        chance = random.Random(0)
        return await asyncio.gather(
            *(ask(engine, request) for request in requests),
            *(ask(engine, dict(request), chance.uniform(0.1, 8)) for request in aborted))

    engine = Engine(model_path=model, page_size=page, max_total_tokens=pool, dtype="float32",
                    log_level="warning", **options, **ext)
    run = engine.loop.run_until_complete
    result = {"answers": run(together(engine, requests))}
    if ext:
        result["disturbed"] = []
        swapped_in = -1
        # How many are swapped in depends on the speed of the machine: aborts come after seconds.
        while swapped_in <= least and len(result["disturbed"]) < 5:
            result["disturbed"].append(run(disturbed(engine, requests[:4], aborted)))
            deadline = time.monotonic() + 60
            left = {"swapped": 1}
            while any(left.get(what) for what in waits) and time.monotonic() < deadline:
                time.sleep(0.2)
                engine.collective_rpc("probe", path=state)
                left = json.load(open(state))
            swapped_in = left["counts"]["swapped_in"]
        result["left"] = left
    print(json.dumps(result), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""

_TOKENS = 24
_LEAST = 10
_MARKOV = {"trace": "markov", "seed": 7}
NOTHING = (
    "swapped", "used", "pinned", "flying", "resuming", "dropped", "protected", "places",
)  # fmt: skip

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    },
    "required": ["name", "numbers"],
}


def requests(model: Path, *, overlap: bool) -> list[dict[str, Any]]:
    """Returns requests with each kind of state that must survive preemption.

    Args:
        overlap: whether SGLang prepares a step before the last one has ended; its penalties then
            depend on the other requests.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = sharegpt_prompts(10, characters=(2000, 6000))
    made: list[dict[str, Any]] = [
        {
            "input_ids": tokenizer.encode(text)[: 60 + 37 * number],
            "sampling_params": {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True},
        }
        for number, text in enumerate(texts)
    ]
    sampling = [one["sampling_params"] for one in made]
    if not overlap:
        sampling[1] |= {"frequency_penalty": 1.0, "presence_penalty": 0.5}
        sampling[2] |= {"repetition_penalty": 1.3}
    sampling[3] |= {"json_schema": json.dumps(_SCHEMA), "ignore_eos": False}
    sampling[4] |= {"stop": [" the", ","], "ignore_eos": False}
    sampling[5] |= {"n": 2}
    made[6] |= {"stream": True}
    made[7] |= {"return_logprob": True}
    made[8] |= {"return_logprob": True, "logprob_start_len": 50}  # SGLang recomputes these
    sampling[9] |= {"min_new_tokens": 18, "ignore_eos": False}
    return made


def play(
    directory: Path,
    model: Path,
    page: int,
    pool: int,
    *,
    overlap: bool,
    config: dict[str, Any] | None,
    experiment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the answers of an engine: stock SGLang without preemption if ``config`` is None."""
    asked = requests(model, overlap=overlap)
    options = {} if overlap else {"disable_overlap_schedule": True}
    state, aborted = str(directory / "state.json"), asked[4:10] * 2
    least = -1 if experiment and "recompute" in experiment else _LEAST
    arguments = [str(model), page, pool, options, config, asked, aborted, least, state]
    disturbed = retracting(5) if config is not None else {}
    if experiment:
        disturbed[EXPERIMENT] = json.dumps(experiment)
    environment = CHECKED | disturbed
    lines, _ = run_program(directory, PROGRAM, arguments, timeout=900, environment=environment)
    found: dict[str, Any]
    (found,) = lines
    return found


Stock = Callable[[int, bool], list[Any]]


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Returns a function that returns the answers of stock SGLang; each engine runs once."""

    @cache
    def run(page: int, overlap: bool) -> list[Any]:
        directory = tmp_path_factory.mktemp("stock")
        found = play(directory, model, page, 20_000, overlap=overlap, config=None)
        answers: list[Any] = found["answers"]
        return answers

    return run


@pytest.mark.parametrize(
    ("page", "overlap", "policy"),
    [
        (16, False, {}),
        (1, True, {"swap_in": "overlap", "quantum": 4, "experiment": {"trace": "random"}}),
        # The capacity holds five pages.
        (16, True, {"quantum": 4, "capacity": "800KiB", "experiment": _MARKOV}),
        (16, False, {"experiment": {"recompute": True}}),
    ],
)
def test_preemption_aborts_and_failed_loads_keep_answers(
    page: int,
    overlap: bool,
    policy: dict[str, Any],
    stock: Stock,
    model: Path,
    tmp_path: Path,
) -> None:
    asked = requests(model, overlap=overlap)
    policy = dict(policy)
    experiment = policy.pop("experiment", {})
    swap = {"capacity": "48MiB"} | policy
    host = "64MiB" if swap["capacity"] == "48MiB" else "8MiB"
    config = {"tiers": {"host": {"capacity": host}}, "swap": swap}
    # So small that preempted requests have to leave the device.
    pool = 700 if "swap_in" in policy else 1200
    undisturbed = stock(page, overlap)
    ours = play(tmp_path, model, page, pool, overlap=overlap, config=config, experiment=experiment)
    for expected, found in zip(undisturbed, ours["answers"], strict=True):
        for stocks, mine in zip(expected, found, strict=True):
            assert (mine["text"], mine["why"]) == (stocks["text"], stocks["why"])
            assert mine["out"] == pytest.approx(stocks["out"], abs=1e-3)
            assert mine["prompt"] == pytest.approx(stocks["prompt"], abs=1e-3)
            assert mine["seen"] > 10 or stocks["seen"] <= 10
    for answers in ours["disturbed"]:
        for expected, found in zip(undisturbed[:4], answers, strict=False):
            assert [each["text"] for each in found] == [each["text"] for each in expected]
        assert "abort" in {each["why"] for found in answers for each in found}
    left = ours["left"]
    assert {name: left[name] for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    counts = left["counts"]
    entries = [entry for each in ours["answers"] for one in each for entry in one["ext"]]
    swaps = [entry for entry in entries if entry["power"] == "swap"]
    if "recompute" in experiment:
        assert not swaps
        assert counts["recomputed"] > _LEAST
        return
    assert left["lost"] or "swap_in" in policy
    assert swaps
    assert all(entry["exact"] and entry["times"] > 0 for entry in swaps)
    assert counts["swapped_in"] > _LEAST
    assert counts["loaded_pages"] > 0
    if host == "64MiB":
        # Prompt logprobs require a prefill, and an aborted request is computed to its end.
        again = counts["recomputed"] * (max(len(one["input_ids"]) for one in asked) + _TOKENS)
        assert counts["recomputed_tokens"] <= again


def test_requests_are_recomputed_where_the_link_to_host_memory_is_slow(
    stock: Stock, model: Path, tmp_path: Path
) -> None:
    """A second per request through the link, and a fraction of it to compute the request again.

    The first swap-ins measure the link. Later requests leave without their KV, or give it up.
    """
    link = {"bytes_per_second": "2MiB", "latency": 0.001}
    config = {"tiers": {"host": {"capacity": "64MiB", "link": link}}, "swap": {"capacity": "48MiB"}}
    undisturbed = stock(16, False)
    experiment = {"recompute": False}  # only few swap-ins are expected
    ours = play(tmp_path, model, 16, 1200, overlap=False, config=config, experiment=experiment)
    for expected, found in zip(undisturbed, ours["answers"], strict=True):
        for stocks, mine in zip(expected, found, strict=True):
            assert (mine["text"], mine["why"]) == (stocks["text"], stocks["why"])
            assert mine["out"] == pytest.approx(stocks["out"], abs=1e-3)
            assert mine["prompt"] == pytest.approx(stocks["prompt"], abs=1e-3)
    left = ours["left"]
    assert {name: left[name] for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    chosen = {
        (kind, choice): counted["count"]
        for kind, found in left["decisions"].items()
        for choice, counted in found["choices"].items()
    }
    computing = chosen.get(("leave", "drop"), 0) + chosen.get(
        ("swap_in_or_recompute", "recompute"), 0
    )
    assert computing > 0
    assert left["counts"]["recomputed"] >= computing
    assert left["decisions"]["forward"]["error"] is not None
    assert left["decisions"]["decode"]["error"] is not None


CUT = """
import asyncio, json, sys, time
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler

def probe(self, path):
    from sgl_ext.engine.core import runtime
    ext = runtime.current
    tiers = ext.tiers.describe()
    json.dump({"stored": not any(each["queue_depth"] for each in tiers.values()),
               "swapped_in": ext.swap.manager.counts.swapped_in}, open(path, "w"))

Scheduler.probe = probe

def main():
    model, options, config, prompts, state = json.load(open(sys.argv[1]))
    ext = {"enable_ext": True, "ext_config": config} if config else {}
    engine = Engine(model_path=model, page_size=16, dtype="float32", log_level="warning",
                    enable_priority_scheduling=True, **options, **ext)

    async def ask(number, begun=None):
        ids, new, priority = prompts[number]
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        request = GenerateReqInput(
            input_ids=ids, sampling_params=sampling, priority=priority, stream=True)
        seen = 0
        async for answer in engine.tokenizer_manager.generate_request(request):
            seen += 1
            if begun is not None and seen == 4:
                begun.set()
        return [answer["text"], [one["power"] for one in answer["meta_info"].get("ext", ())]]

    def probed():
        engine.collective_rpc("probe", path=state)
        return json.load(open(state))

    async def all():
        begun = asyncio.Event()
        first = asyncio.create_task(ask(0, begun))
        await begun.wait()
        return await asyncio.gather(first, ask(1), ask(2))

    if config:
        engine.loop.run_until_complete(ask(2))
        while not probed()["stored"]:
            time.sleep(0.1)
        engine.flush_cache()
    answers = engine.loop.run_until_complete(all())
    swapped = probed()["swapped_in"] if config else 0
    print(json.dumps({"answers": answers, "swapped_in": swapped}), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("swap_in", ["wait", "overlap"])
def test_a_request_is_not_resumed_into_the_memory_of_a_prompt_that_is_cut(
    swap_in: str, model: Path, tmp_path: Path
) -> None:
    """A request is swapped out for an urgent one. When that one has ended, a long prompt precedes
    the swapped request, and both together do not fit. The prompt is restored from an SSD, so that
    its parts do not use up the budget of computed tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.encode(text) for text in sharegpt_prompts(3, characters=(4000, 9000))]
    prompts = [
        (ids[:length], new, priority)
        for ids, (length, new, priority) in zip(
            texts, [(400, 150, 0), (800, 4, 40), (700, 8, 20)], strict=True
        )
    ]
    swap = {"capacity": "48MiB", "swap_in": swap_in}
    ssd = {
        "directories": [str(tmp_path / "ssd")], "capacity": "1GiB", "keep_after": 1,
        "emulate": {"bytes_per_second": "8MB"},
    }  # fmt: skip
    (tmp_path / "ssd").mkdir()
    tiers = {"host": {"capacity": "64MiB"}, "ssd": ssd}
    config = {"tiers": tiers, "swap": swap, "restore": {"chunk": 64}}
    answers = []
    for pool, section in ((16_384, None), (1024, config)):
        options = {"max_total_tokens": pool, "chunked_prefill_size": 512}
        arguments = [str(model), options, section, prompts, str(tmp_path / "state.json")]
        lines, _ = run_program(tmp_path, CUT, arguments, environment=CHECKED)
        answers.append(lines[0]["answers"])
    assert [text for text, _ in answers[1]] == [text for text, _ in answers[0]]
    assert "restore" in answers[1][2][1]
    # The long prompt may preempt the request once more.
    assert lines[0]["swapped_in"] in (1, 2)
