"""Engines with tiers give the answers of stock SGLang after evictions and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import CHECKED, retracting, run_program

from sgl_ext.bench.data.conversations import conversations

PROGRAM = """
import json, os, random, sys, time
from contextlib import suppress
from sglang.srt.entrypoints.engine import Engine

if __name__ != "__main__":  # a scheduler, which imports this file first
    from sgl_ext.engine.restore import by_layers
    from sgl_ext.engine.step import rows
    from sgl_ext.memory.tickets import TransferCancelledError

    choose = random.Random(os.getpid())
    own = by_layers.taken_back, rows.handed_over

    def taken_back(ticket, streams):
        if choose.random() < 0.3:
            with suppress(TransferCancelledError):
                ticket.wait(60)  # computing and loading meet here
        return own[0](ticket, streams)

    def handed_over(*arguments):
        with open(os.environ["MEETINGS"], "a") as file:
            file.write("x")
        return own[1](*arguments)

    by_layers.taken_back, rows.handed_over = taken_back, handed_over

def answers(engine, prompts):
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    for pair in zip(prompts[::2], prompts[1::2]):
        for answer in engine.generate(input_ids=list(pair), sampling_params=sampling,
                                      return_logprob=True):
            meta = answer["meta_info"]
            yield [answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]],
                   meta.get("cached_tokens_details") or {}, meta.get("ext") or []]

def main():
    model, rounds, page, config = json.load(open(sys.argv[1]))
    ext = {"enable_ext": True, "ext_config": config} if config else {}
    engine = Engine(model_path=model, page_size=page, max_total_tokens=1024, dtype="float32",
                    log_level="warning", enable_tokenizer_batch_encode=True,
                    skip_tokenizer_init=True,
                    chunked_prefill_size=256, **ext)
    def live():
        return engine.get_server_info()["internal_states"][0].get("sgl_ext", {})

    def tiers():
        return live().get("tiers", {})

    result = {"rounds": []}
    for number, prompts in enumerate(rounds):
        if number == 2 and "staging" in (config or {}).get("tiers", {}):
            # What staging memory still has depends on when requests are retracted: only the SSD
            # keeps its pages.
            before = None
            while (now := tiers()) != before or any(one["queue_depth"] for one in now.values()):
                before = now
                time.sleep(1)
            engine.flush_cache()
        result["rounds"].append(list(answers(engine, prompts)))
    result["tiers"], result["planning"] = tiers(), live().get("planning")
    print(json.dumps(result), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_every_tier_gives_the_answers_of_stock_sglang(model: Path, tmp_path: Path) -> None:
    held = conversations(model, 4, turns=2, tokens=(300, 520))
    rounds = [[each.prompts[turn] for each in held] for turn in range(2)]
    rounds.append(rounds[1])
    (tmp_path / "ssd").mkdir()
    ssd = {"directories": [str(tmp_path / "ssd")], "capacity": "2GiB", "keep_after": 1}
    slow = {"capacity": "96MiB", "emulate": {"bytes_per_second": "20MiB"}}
    below = {"tiers": {"ssd": ssd, "staging": "13MiB"}}
    configs = [
        (16, None),
        (1, below),
        (16, {"tiers": {"host": {"capacity": "96MiB"}}}),
        (16, below),
        (16, {"tiers": {"ssd": ssd, "host": {"capacity": "96MiB"}}}),  # restarted with stored pages
        (16, {"tiers": {"host": slow}, "restore": {"host": "layers"}}),
        (16, {"tiers": {"host": slow}, "restore": {"host": "tokens"}}),
    ]
    runs = []
    for page, config in configs:
        found, _ = run_program(
            tmp_path, PROGRAM, [str(model), rounds, page, config],
            environment={"MEETINGS": str(tmp_path / "meetings"), **CHECKED, **retracting(11)},
        )  # fmt: skip
        runs += found
    stock, *tiered = (run["rounds"] for run in runs)
    for system in tiered:
        for expected, found in zip(stock, system, strict=True):
            for (ids, logprobs, *_), (our_ids, our_logprobs, *_) in zip(
                expected, found, strict=True
            ):
                assert our_ids == ids
                assert our_logprobs == pytest.approx(logprobs, abs=1e-3)

    def hits(round_: list[list[object]], tier: str) -> int:
        return sum(details.get(tier, 0) for *_, details, _ in round_)  # type: ignore[attr-defined]

    asked = sum(map(len, rounds[1]))
    by_token, host, by_page, restarted, *restoring = tiered
    for system, run in ((by_token, runs[1]), (by_page, runs[3])):
        assert hits(system[2], "ssd") > 0.5 * asked, (run["tiers"], run["planning"])
    assert hits(host[1], "host") > 0.5 * asked
    assert hits(host[2], "host") > 0.9 * asked
    assert hits(restarted[0], "ssd") > 0.9 * sum(map(len, rounds[0]))
    assert hits(restarted[2], "host") > 0.9 * asked
    for system in restoring:
        told = [entry for round_ in system for *_, entries in round_ for entry in entries]
        restored = [entry for entry in told if entry["power"] == "restore"]
        assert sum(entry["computed"] for entry in restored) > 100
        assert sum(entry["loaded"]["host"] for entry in restored) > 100
    # The file has one byte per forward that computed its lower layers and loaded the upper ones.
    assert (tmp_path / "meetings").stat().st_size > 5
    for run in runs[1:]:
        assert all(not tier["failures"] for tier in run["tiers"].values())
        entries = [entry for round_ in run["rounds"] for *_, told in round_ for entry in told]
        computed = sum(entry.get("computed", 0) for entry in entries)  # during loads
        assert computed + sum(tier["hit_tokens"] for tier in run["tiers"].values()) > asked
