"""Tests that a prompt computed in arbitrary rows equals SGLang's prefill bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import CHECKED, run_program

from sgl_ext.bench.data.texts import sharegpt_prompts

PROMPTS = 8

PROGRAM = """
import json, random, sys, time
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler

split = 0  # requests that were computed in rows
unplanned = []  # SGLang's own

def plan_of(ids, choose):
    from sgl_ext.planning.plan import Compute, PrefillPlan, Span
    cuts = sorted(choose.sample(range(1, len(ids)), min(choose.randrange(9), len(ids) - 1)))
    bounds = [0, *cuts, len(ids)]
    return PrefillPlan([Span(a, b, Compute()) for a, b in zip(bounds, bounds[1:])])

def probe(self, path, seed):
    from sgl_ext.engine.core import runtime
    from sgl_ext.engine.step import rows
    global split
    choose = random.Random(seed)
    if not unplanned:
        unplanned.extend([Req.__init__, rows.split])
    initialize, row_split = unplanned

    def planned(req, rid, text, ids, *args, **kw):
        initialize(req, rid, text, ids, *args, **kw)
        if choose.random() < 0.7:
            runtime.current.plans[rid] = plan_of(ids, choose)

    def counting(batch, parts):
        global split
        split += len(parts) > len(batch.rids)
        return row_split(batch, parts)

    if seed:
        Req.__init__, rows.split = planned, counting
    json.dump(split, open(path, "w"))

# Schedulers import this file before their arguments arrive.
Scheduler.probe = probe

def answers(engine, prompts):
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    for at, end in [(0, 1), (1, 3), (3, 6), (6, 8)]:
        start, top = [(0, 2), (-1, 0), (5, 1)][at % 3]
        # Several at once arrive as one message, so that every run forms the same batches.
        for answer in engine.generate(prompts[at:end], sampling, return_logprob=True,
                                      logprob_start_len=start, top_logprobs_num=top):
            meta = answer["meta_info"]
            yield [answer["output_ids"], meta["output_token_logprobs"],
                   meta["input_token_logprobs"], meta.get("input_top_logprobs"),
                   meta.get("output_top_logprobs")]

def main():
    model, prompts, page, chunk, state = json.load(open(sys.argv[1]))
    engine = Engine(model_path=model, page_size=page, max_total_tokens=4096, dtype="float32",
                    log_level="warning", enable_tokenizer_batch_encode=True,
                    chunked_prefill_size=chunk, enable_ext=True, max_running_requests=3,
                    disable_overlap_schedule=page == 16)
    results = []
    for seed in range(3):
        while not engine.flush_cache().success:
            time.sleep(0.1)  # what has answered may not have ended
        engine.collective_rpc("probe", path=state, seed=seed)
        results.append(list(answers(engine, prompts)))
    engine.collective_rpc("probe", path=state, seed=0)
    print(json.dumps({"results": results, "split": json.load(open(state))}), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("page", "chunk"), [(1, 64), (16, 256)])
def test_split_prefill_equals_whole_prefill(
    page: int, chunk: int, model: Path, tmp_path: Path
) -> None:
    prompts = sharegpt_prompts(PROMPTS, characters=(200, 1200))
    arguments = [str(model), prompts, page, chunk, str(tmp_path / "state")]
    (found,), _ = run_program(tmp_path, PROGRAM, arguments, environment=CHECKED)
    whole, *in_rows = found["results"]
    assert len(whole) == PROMPTS
    for rows in in_rows:
        assert rows == whole
    assert found["split"] >= PROMPTS
