"""Tests that both layouts of the KV pool give equal answers under eviction and retraction."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import CHECKED, retracting, run_program
from fuzz_kit import rounds

from sgl_ext.bench.data.texts import sharegpt_prompts

PROMPTS = rounds(12)
"""Number of ShareGPT prompts; SGLEXT_ROUNDS=50 takes four times as long."""

PROGRAM = """
import json, sys
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import Scheduler
from sgl_ext.engine.kv.resize import KVResizer
from sgl_ext.memory.block_groups import BlockGroups

named = 0  # blocks that were asked for in the name of a request

def counting(method, owners_of):
    def count(groups, requests):
        global named
        named += sum(owner is not None for owner in owners_of(requests))
        return method(groups, requests)
    return count

BlockGroups.append = counting(BlockGroups.append, lambda owners: owners)
BlockGroups.allocate = counting(
    BlockGroups.allocate, lambda requests: [owner for owner, blocks in requests if blocks])

def probe(self, path, gone=0, back=0):
    if hasattr(self.token_to_kv_pool_allocator, "groups"):
        self.token_to_kv_pool_allocator.groups.check_integrity()
        resizer = KVResizer(self)
        assert resizer.shrink(gone)
        resizer.grow(back)
    state = {"size": self.max_total_num_tokens, "longest": self.max_req_len, "named": named,
             "available": self.token_to_kv_pool_allocator.available_size()
             + self.tree_cache.evictable_size()}
    with open(path, "w") as sink:
        json.dump(state, sink)

# Schedulers import this file before their arguments arrive.
Scheduler.probe = probe

def state(engine, path, **change):
    engine.collective_rpc("probe", path=path, **change)
    return json.load(open(path))

def answers(engine, prompts):
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    for pair in zip(prompts[::2], prompts[1::2]):
        # Two at once arrive as one message, so that every run forms the same batches.
        for answer in engine.generate(list(pair), sampling, return_logprob=True):
            meta = answer["meta_info"]
            yield [answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]],
                   meta["cached_tokens"], meta["prompt_tokens"]]

def main():
    model, prompts, page, scratch, layout = json.load(open(sys.argv[1]))
    engine = Engine(model_path=model, page_size=page, max_total_tokens=512,
                    log_level="warning", enable_tokenizer_batch_encode=True,
                    enable_ext=True, ext_config={"memory": {"layout": layout}})
    info = engine.get_server_info()["sgl_ext"]["memory"]
    result = {"memory": info, "answers": list(answers(engine, prompts))}
    # Half of the blocks go, the others serve, the first half comes back.
    short = sorted(prompts, key=len)[:2]
    half = 256 // page if layout == "block_major" else 0
    engine.flush_cache()
    result["states"] = [state(engine, scratch, gone=half)]
    result["small"] = list(answers(engine, short))
    result["states"] += [state(engine, scratch), state(engine, scratch, back=half)]
    engine.flush_cache()
    result["again"] = list(answers(engine, short))
    result["states"] += [state(engine, scratch)]
    print(json.dumps(result), flush=True)
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("page", [1, 16])
def test_layouts_agree_under_eviction_and_retraction(
    page: int, model: Path, tmp_path: Path
) -> None:
    prompts = sharegpt_prompts(PROMPTS, characters=(300, 900))
    runs, logs = [], []
    for layout in ("block_major", "layer_major"):
        arguments = [str(model), prompts, page, str(tmp_path / "state"), layout]
        found, log = run_program(tmp_path, PROGRAM, arguments, environment=CHECKED | retracting(5))
        runs += found
        logs.append(log)
    slab, stock = runs
    assert slab["memory"]["layout"] == "block_major"
    assert slab["memory"]["blocks"] == 512 // page + 1
    assert stock["memory"] == {
        "layout": "layer_major",
        "because": "the configuration selects the layer-major layout",
    }
    assert len(slab["answers"]) == PROMPTS
    assert slab["answers"] == stock["answers"]
    assert sum(len(ids) for ids, *_ in slab["answers"]) == PROMPTS * 12
    # Both runs retract requests, and evict KV: the prompts exceed the pool several times.
    assert all(log.count("Testing retraction") > PROMPTS // 3 for log in logs)
    assert sum(prompt for *_, prompt in slab["answers"]) > 3 * 512

    states = [(state["size"], state["longest"], state["available"]) for state in slab["states"]]
    assert states == [(256, 255, 256)] * 2 + [(512, 511, 512)] * 2
    for part in ("small", "again"):
        assert len(slab[part]) == 2
        assert slab[part] == stock[part]
    # SGLang's allocations name the requests that they are for.
    assert slab["states"][0]["named"] > PROMPTS + PROMPTS * 12 // page
    assert stock["states"][0]["named"] == 0
