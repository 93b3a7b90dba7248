"""Engines of two pipeline stages with tiers give the answers of one stage without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_kit import CHECKED, retracting, run_program

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.models import untied

PROGRAM = """
import asyncio, json, random, sys, time
from sglang.srt.entrypoints.engine import Engine

SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

async def one(engine, rid, prompt, after, dies):
    await asyncio.sleep(after)
    request = await engine.async_generate(input_ids=prompt, sampling_params=SAMPLING, rid=rid,
                                          return_logprob=True, stream=True)
    last = None
    async for part in request:
        last = part
        if dies:
            engine.tokenizer_manager.abort_request(rid)
    if dies:
        return None
    meta = last["meta_info"]
    return [last["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]],
            meta.get("cached_tokens_details") or {}, meta.get("ext") or []]

async def one_by_one(engine, number, prompts):
    return [await one(engine, f"{number}/{place}", prompt, 0, False)
            for place, prompt in enumerate(prompts)]

async def at_once(engine, number, prompts, apart, dying):
    choose = random.Random(number)
    order = list(range(len(prompts)))
    choose.shuffle(order)
    coming = [one(engine, f"{number}/{place}", prompts[place], apart * at, False)
              for at, place in enumerate(order)]
    # Their prompts are others' with other ends, so that their prefixes are in tiers, too.
    coming += [one(engine, f"{number}/dies/{at}", prompts[at][:-9] + [7, 8, 9], apart * at, True)
               for at in range(dying)]
    found = await asyncio.gather(*coming)
    return [answer for _, answer in sorted(zip(order, found))]

def main():
    model, rounds, stages, config = json.load(open(sys.argv[1]))
    ext = {"enable_ext": True, "ext_config": config} if config else {}
    engine = Engine(model_path=model, page_size=16, max_total_tokens=1536, dtype="float32",
                    log_level="warning", skip_tokenizer_init=True, chunked_prefill_size=256,
                    pp_size=stages, **ext)
    def tiers():
        live = engine.get_server_info()["internal_states"][0]
        return live.get("sgl_ext", {}).get("tiers", {})

    told = []
    for number, prompts in enumerate(rounds):
        if number >= 2:
            before = None
            while (now := tiers()) != before:  # until everything is stored
                before = now
                time.sleep(1)
            assert engine.flush_cache().success
        if number == 3:
            answers = one_by_one(engine, number, prompts)
        else:
            answers = at_once(engine, number, prompts, *((0.2, 3) if config else (0, 0)))
        told.append(engine.loop.run_until_complete(answers))
    print(json.dumps({"rounds": told, "tiers": tiers()}), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_stages_with_tiers_give_the_answers_of_one_stage_without(
    model: Path, tmp_path: Path
) -> None:
    parted = untied(model)  # SGLang's stages require it
    held = conversations(model, 6, turns=2, tokens=(300, 520))
    rounds = [[each.prompts[turn] for each in held] for turn in (0, 1, 1, 1)]
    for directory in ("ssd", "slow"):
        (tmp_path / directory).mkdir()
    ssd = {"directories": [str(tmp_path / "ssd")], "capacity": "2GiB", "keep_after": 1}
    one_stage: Mapping[str, Any] = {}
    configs = {
        "host": {"tiers": {"host": {"capacity": "48MiB"}}},
        "scarce": {"tiers": {"host": {"capacity": "4MiB"}}},
        "ssd": {"tiers": {"ssd": ssd, "staging": "8MiB"}},
        "restored": {
            "tiers": {
                "ssd": {
                    **ssd,
                    "directories": [str(tmp_path / "slow")],
                    "emulate": {"bytes_per_second": "4MiB"},
                },
                "staging": "24MiB",
            },
            "restore": {"chunk": 64},
        },
        "restarted": {"tiers": {"ssd": ssd, "host": {"capacity": "48MiB"}}},
    }
    asked = sum(map(len, rounds[1]))
    for name, config in {"stock": None, **configs}.items():
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        # One stage retracts requests, too, so that it computes some tokens in other forwards.
        (found,), _ = run_program(
            folder, PROGRAM, [str(parted), rounds, 2 if config else 1, config],
            environment=CHECKED | retracting(11),
        )  # fmt: skip
        if config is None:
            one_stage = found
            continue
        for expected, round_ in zip(one_stage["rounds"], found["rounds"], strict=True):
            for (ids, logprobs, *_), (our_ids, our_logprobs, *_) in zip(
                expected, round_, strict=True
            ):
                assert our_ids == ids, name
                assert our_logprobs == pytest.approx(logprobs, abs=1e-3), name
        hits = [_tokens(round_) for round_ in found["rounds"]]
        if name == "host":
            assert hits[1].get("host", 0) > 0.4 * asked
        if name == "ssd":
            # Flushes have emptied device and host memory. Half of the prompts asked at once may
            # find what aborted requests with nearly the same prompts have loaded, and the cost
            # model may choose to compute a few, as it does where a busy machine reads slowly.
            assert hits[2]["ssd"] > 0.25 * asked
            assert hits[2].total() > 0.5 * asked
            assert hits[3]["ssd"] > 0.5 * asked
        if name == "restored":
            # While others run, a request may wait for its pages; alone it never does.
            told = [entry for *_, entries in found["rounds"][3] for entry in entries]
            restored = [entry for entry in told if entry["power"] == "restore"]
            assert len(restored) == len(held)
            assert sum(entry["computed"] for entry in restored) > 100
            assert sum(entry["loaded"]["ssd"] for entry in restored) > 100
        if name == "restarted":
            first = sum(map(len, rounds[0]))
            assert hits[0]["ssd"] > 0.25 * first
            assert hits[0].total() > 0.5 * first
        failures = {tier: each["failures"] for tier, each in found["tiers"].items()}
        assert all({*each} <= {"no_room"} for each in failures.values()), failures


def _tokens(answers: Sequence[Any]) -> Counter[str]:
    """Returns the cached tokens of some answers by their source."""
    found: Counter[str] = Counter()
    for _, _, details, _ in answers:
        found.update(details)
    return found
