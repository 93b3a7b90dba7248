"""Prefixes that are computed and loaded at the same time give the answers of stock SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_kit import CHECKED, retracting, run_program

from sgl_ext.bench.data.texts import sharegpt_prompts

PROGRAM = """
import asyncio, glob, json, os, random, sys, time
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler

own = []  # how the planner decides where a forward ends

def probe(self, path, seed=0, policy="shortest"):
    from sgl_ext.engine.core import runtime
    from sgl_ext.planning import planner as module
    from sgl_ext.planning.policies import POLICIES, Shortest

    class Last(Shortest):  # who comes interrupts who is there
        def rank(self, one):
            return -one.arrived

    ext = runtime.current
    planner, host = ext.tiers.planner, ext.tiers.stack.host
    planner._channels._policy = {**POLICIES, "last": Last}[policy](0.2)
    if not own:
        own.append(module.next_part)
    choose = random.Random(seed)

    def anywhere(pointers, at, costs, position, **known):
        free, flying = pointers.next_free, pointers.flying
        if free is None or (flying and free.end > flying.end) or choose.random() < 0.2:
            return own[0](pointers, at, costs, position, **known)
        begin = max(free.begin, pointers.front)
        return at.end(begin + choose.randint(1, free.end - begin))

    module.next_part = anywhere if seed else own[0]
    self.token_to_kv_pool_allocator.groups.check_integrity()
    host.check_integrity()
    ssd = ext.tiers.stack.lower[0]
    json.dump({"plans": len(ext.plans), "restoring": len(planner.wants.requests),
               "leaving": len(planner.wants.leaving), "interrupted": planner.interrupted,
               "pinned": host._pinned,
               "protected": self.tree_cache.protected_size(),
               "places": host.capacity - host.free - len(host),
               "ssd": ssd.tier.statistics().pages, "moving": ssd.under_way,
               "failures": ssd.tier.statistics().failures}, open(path, "w"))

# Schedulers import this file before their arguments arrive.
Scheduler.probe = probe

def main():
    model, page, config, options, script, state = json.load(open(sys.argv[1]))
    # Pages are let go in the next step, and stored in those after it.
    waits = ("leaving", "moving", "pinned", "protected", "places")

    async def ask(engine, step):
        manager = engine.tokenizer_manager
        if "abort_after" in step:
            asyncio.get_running_loop().call_later(
                step["abort_after"], manager.abort_request, step["rid"])
        await asyncio.sleep(step.get("later", 0))
        start, top = step.get("logprobs", [-1, 0])
        request = GenerateReqInput(
            rid=step.get("rid"), input_ids=step["ids"], return_logprob=True,
            logprob_start_len=start, top_logprobs_num=top,
            sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True})
        async for answer in manager.generate_request(request):
            meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return "aborted"
        return [answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]],
                [entry[0] for entry in meta["input_token_logprobs"] or ()], meta.get("ext"),
                [meta["cached_tokens"], meta["prompt_tokens"],
                 meta.get("cached_tokens_details") or {}]]

    async def together(engine, steps):
        return await asyncio.gather(*(ask(engine, step) for step in steps))

    def look(engine, seed=0, policy="shortest"):
        engine.collective_rpc("probe", path=state, seed=seed, policy=policy)
        return json.load(open(state))

    def flush(engine):
        while not engine.flush_cache().success:
            time.sleep(0.1)  # what has answered may not have ended

    more = {"enable_ext": True, "ext_config": config} if config else {}
    engine = Engine(model_path=model, page_size=page, max_total_tokens=6000, dtype="float32",
                    log_level="warning", chunked_prefill_size=512,
                    skip_tokenizer_init=True, **options, **more)
    for number, (what, seed, policy, steps) in enumerate(script):
        if config and number:
            deadline = time.monotonic() + 60
            while look(engine)["moving"] and time.monotonic() < deadline:
                time.sleep(0.1)
            flush(engine)
            look(engine, seed, policy)
        elif number:
            flush(engine)
        if "torn" in what or "lost" in what:
            for name in glob.glob(os.path.join(config["tiers"]["ssd"]["directories"][0],
                                            "**", "pages"), recursive=True):
                with open(name, "r+b") as file:
                    if "lost" in what:
                        file.truncate(os.path.getsize(name) // 3)
                    for at in range(0, os.path.getsize(name), 1 << 20):
                        file.seek(at + 100)
                        file.write(bytes(64))
        asked = time.monotonic()
        answers = engine.loop.run_until_complete(together(engine, steps))
        seconds = time.monotonic() - asked
        left = {}
        if config:
            deadline = time.monotonic() + 60
            left = look(engine, seed, policy)
            while any(left[what] for what in waits) and time.monotonic() < deadline:
                time.sleep(0.1)
                left = look(engine, seed, policy)
        print(json.dumps({"what": what, "answers": answers, "seconds": seconds, "left": left}),
              flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""

Step = dict[str, Any]

NOTHING = ("plans", "restoring", "leaving", "pinned", "protected", "places")
"""Keys of the probe whose values are zero after all requests have ended."""


def play(
    script: Sequence[tuple[str, int, str, list[Step]]],
    model: Path,
    page: int,
    tmp_path: Path,
    *,
    rate: float | None,
    retract: bool,
    layer_major: bool = False,
    **options: object,
) -> dict[str, Step]:
    """Runs an engine and returns its output for each group of requests, by the group's name.

    Args:
        script: name, seed, policy and requests of each group. With seed 0 the extension chooses
            where a forward ends; other seeds choose mostly at random.
        rate: bytes per second of the SSD; None runs stock SGLang.
        retract: whether SGLang retracts running requests at regular intervals.
        layer_major: whether pages are layer-major, and restored by layers where they can be.
    """
    directory = tmp_path / "ssd"
    directory.mkdir()
    ssd = {
        "directories": [str(directory)], "capacity": "2GiB", "keep_after": 1,
        "emulate": {"bytes_per_second": f"{(rate or 0) // 1024:.0f}KiB", "latency": "1ms"},
    }  # fmt: skip
    ours: dict[str, dict[str, Any]] = {
        "tiers": {"ssd": ssd, "staging": "192MiB"}, "restore": {"chunk": 128},
    }  # fmt: skip
    if layer_major:
        ours["tiers"]["layout"], ours["restore"]["ssd"] = "layer_major", "layers"
    config = None if rate is None else ours
    arguments = [str(model), page, config, options, script, str(tmp_path / "state")]
    disturbed = retracting(7) if retract else {}
    lines, _ = run_program(tmp_path, PROGRAM, arguments, environment=CHECKED | disturbed)
    return {one["what"]: one for one in lines}


def same(expected: Step, found: Step, numbers: Sequence[int]) -> None:
    """Asserts that tokens are equal and that logprobs agree within 1e-3.

    Logprobs differ slightly, because the number of tokens in a matrix product affects its result.
    Aborted requests are not compared.

    Args:
        numbers: the request in ``expected`` that each request in ``found`` repeats.
    """
    for number, answer in zip(numbers, found["answers"], strict=True):
        if answer == "aborted":
            continue
        ids, logprobs, of_prompt, *_ = expected["answers"][number]
        assert answer[0] == ids
        assert answer[1] == pytest.approx(logprobs, abs=1e-3)
        assert answer[2] == pytest.approx(of_prompt, abs=1e-3)


def restored(step: Step) -> list[Step]:
    entries = [entry for answer in step["answers"] for entry in answer[3] or ()]
    return [entry for entry in entries if entry["power"] == "restore"]


def counted(step: Step) -> None:
    """Asserts that loaded tokens count as cached, by tier, and that computed tokens do not."""
    for answer in step["answers"]:
        if answer == "aborted":
            continue
        cached, prompt, details = answer[4]
        assert cached == sum(details.values()) < prompt
        for entry in answer[3] or ():
            if entry["power"] == "restore":
                assert cached + entry["computed"] <= prompt
                for tier, loaded in entry["loaded"].items():
                    assert details.get(tier, 0) <= loaded
                if not entry["computed"]:
                    assert cached >= sum(entry["loaded"].values())


Script = list[tuple[str, int, str, list[Step]]]


@pytest.fixture(scope="module")
def plain(model: Path) -> Script:
    """Returns two groups of requests that an engine without tiers can serve, too."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = sharegpt_prompts(8, characters=(2500, 4000))
    prompts = [
        tokenizer(text)["input_ids"][:length]
        for text, length in zip(texts, (600, 450, 330, 520, 260, 410, 300), strict=False)
    ]
    steps: list[Step] = [{"ids": ids} for ids in prompts]
    steps[2]["logprobs"] = [len(prompts[2]) - 30, 2]
    new = steps.pop()  # no tier holds a page of this prompt
    return [
        ("fill", 0, "shortest", steps),
        ("plain, too", 3, "shortest", [steps[0], new, steps[4]]),
    ]


@pytest.fixture(scope="module")
def stock(model: Path, plain: Script, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    """Returns the output of stock SGLang for ``plain``."""
    return play(plain, model, 16, tmp_path_factory.mktemp("stock"), rate=None, retract=False)


def _as_fast_as_computing(
    group: tuple[str, int, str, list[Step]], stock: dict[str, Step], model: Path
) -> float:
    """Returns the bytes per second at which a group's KV is loaded while stock SGLang computes it.

    Then each restored prefix has a part that is loaded and one that is computed on any machine.
    """
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    token = config["num_hidden_layers"] * 2 * width * 4
    name, _, _, steps = group
    tokens = sum(len(step["ids"]) for step in steps)
    return float(token * tokens / stock[name]["seconds"])


@pytest.mark.parametrize("page", [16, 1])
def test_restored_prefixes_give_the_answers_of_stock_sglang(
    page: int, plain: Script, stock: dict[str, Step], model: Path, tmp_path: Path
) -> None:
    fill, plain_too = plain
    steps = fill[-1]
    gone = {**steps[0], "rid": "gone", "abort_after": 0.15}
    # One batch contains a prompt twice: one of the two requests waits for the other.
    batches: list[tuple[int, ...]] = [(0,), (1, 2), (3, 4, 3), (0, 1, 2, 3, 4, 5)]
    cuts = [(0, "shortest"), (1, "longest")]
    if page == 1:  # runs the same code as page 16; half the time
        batches, cuts = batches[1:3], [(2, "cake")]
    script = [fill]
    for seed, policy in cuts:
        for batch in batches:
            script.append((f"{batch} {policy}", seed, policy, [steps[at] for at in batch]))
    # However fast the machine is, one of them arrives while another is being restored.
    late = [{**step, "later": place and 0.05 * 2**place} for place, step in enumerate(steps)]
    script += [
        ("interrupted", 4, "last", late),
        plain_too,
        ("aborted", 0, "shortest", [gone, steps[1]]),
        ("torn", 0, "shortest", [steps[0], steps[3]]),
        ("lost", 0, "longest", [steps[1], steps[5]]),
    ]
    retract = page == 1
    ours = play(
        script, model, page, tmp_path, rate=_as_fast_as_computing(plain_too, stock, model),
        retract=retract, enable_mixed_chunk=retract,
        schedule_policy="lpm" if page == 1 else "fcfs",
    )  # fmt: skip
    same(stock["fill"], ours["fill"], range(6))
    for step in ours.values():
        counted(step)
    entries, from_ssd = [], 0
    for _, policy in cuts:
        for batch in batches:
            same(stock["fill"], step := ours[f"{batch} {policy}"], batch)
            entries += restored(step)
            from_ssd += sum(answer[4][2].get("ssd", 0) for answer in step["answers"])
    asked = len(cuts) * sum(len(steps[at]["ids"]) for batch in batches for at in {*batch})
    loaded = sum(entry["loaded"].get("ssd", 0) for entry in entries)
    computed = sum(entry["computed"] for entry in entries)
    assert loaded >= from_ssd > 0.2 * asked
    assert computed > 0.2 * asked
    assert loaded + computed > 0.9 * asked
    same(stock["plain, too"], ours["plain, too"], range(3))
    assert len(restored(ours["plain, too"])) == 2
    assert ours["aborted"]["answers"][0] == "aborted"
    same(stock["fill"], ours["aborted"], (0, 1))
    same(stock["fill"], ours["interrupted"], range(6))
    assert ours["interrupted"]["left"]["interrupted"] > 0
    assert len(restored(ours["interrupted"])) == 6
    same(stock["fill"], ours["torn"], (0, 3))
    same(stock["fill"], ours["lost"], (1, 5))
    assert ours["torn"]["left"]["failures"]["checksum"] > 0
    assert ours["lost"]["left"]["failures"]["ENODATA"] > 0
    for name, step in ours.items():
        left = {what: step["left"][what] for what in NOTHING}
        assert not any(left.values()), f"{name}: {step['left']}"


def test_prefixes_restored_by_layers_from_ssds_give_the_answers_of_stock_sglang(
    plain: Script, stock: dict[str, Step], model: Path, tmp_path: Path
) -> None:
    fill, plain_too = plain
    steps = fill[-1]
    gone = {**steps[1], "rid": "gone", "abort_after": 0.15}
    batches: list[tuple[int, ...]] = [(1,), (2, 4), (3, 5, 3), (0, 1, 2, 3, 4, 5)]
    script = [
        fill,
        *((f"{batch}", 0, "shortest", [steps[at] for at in batch]) for batch in batches),
    ]
    script += [
        plain_too,
        ("aborted", 0, "shortest", [gone, steps[2]]),
        ("torn", 0, "shortest", [steps[1], steps[3]]),
        ("lost", 0, "shortest", [steps[2], steps[5]]),
    ]
    rate = 2 * _as_fast_as_computing(plain_too, stock, model)
    ours = play(script, model, 16, tmp_path, rate=rate, retract=False, layer_major=True)
    same(stock["fill"], ours["fill"], range(6))
    for step in ours.values():
        counted(step)
    for batch in batches:
        same(stock["fill"], ours[f"{batch}"], batch)
    alone = [entry for batch in batches[:2] for entry in restored(ours[f"{batch}"])]
    assert len(alone) == 3
    assert all(entry["loaded"]["ssd"] > 0 for entry in alone)
    assert any(entry["computed"] > 0 for entry in alone)
    same(stock["plain, too"], ours["plain, too"], range(3))
    assert ours["aborted"]["answers"][0] == "aborted"
    same(stock["fill"], ours["aborted"], (1, 2))
    same(stock["fill"], ours["torn"], (1, 3))
    same(stock["fill"], ours["lost"], (2, 5))
    assert ours["torn"]["left"]["failures"]["checksum"] > 0
    assert ours["lost"]["left"]["failures"]["ENODATA"] > 0
    for name, step in ours.items():
        left = {what: step["left"][what] for what in NOTHING}
        assert not any(left.values()), f"{name}: {step['left']}"
