"""Model of random weights, and a program that plays requests to engines and looks into them.

With ``TRITON_INTERPRET=1`` the kernels of SGLang's Triton attention backend run on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_kit import CHECKED, run_program
from forked import Template, template

LAYERS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 2, 64, 512

ROWS = "rows"
"""Id of the request that an engine with tiers computes in rows of seven tokens."""

Step = dict[str, Any]
Group = tuple[str, dict[str, object], list[Step]]
"""Name of a group of requests, changes of the engine before it, and the requests."""
Run = dict[str, Step]
"""Answers to each group and state of the engine after it, by the name of the group."""

PROGRAM = """
import asyncio, json, sys
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler

split = {}  # what the rows of forwards had since the last look
forget = lambda: split.update({"aliased": 0, "holes": 0, "rows": 0, "between layers": 0})
forget()

def in_sevens(ids):
    from sgl_ext.planning.plan import Compute, PrefillPlan, Span
    bounds = [*range(0, len(ids), 7), len(ids)]
    return PrefillPlan([Span(a, b, Compute()) for a, b in zip(bounds, bounds[1:])])

def prepare(scheduler, ext):
    from sglang.srt.managers.schedule_batch import Req
    from sgl_ext.config import Chunks
    from sgl_ext.engine.chunks.power import ChunksPower
    from sgl_ext.engine.step import rows
    initialize, divide, hand_over = Req.__init__, rows.split, rows.handed_over

    def initialized(req, rid, text, ids, *args, **kw):
        initialize(req, rid, text, ids, *args, **kw)
        if rid == "rows" and ext.tiers is not None:
            ext.plans[rid] = in_sevens(ids)

    def divided(batch, parts):
        pairs = [(a, b) for a, b in zip(parts, parts[1:]) if a.request == b.request]
        split["aliased"] += len(pairs)
        split["holes"] += sum(a.end < b.start for a, b in pairs)
        split["rows"] = max(split["rows"], len(parts))
        return divide(batch, parts)

    def handed_over(*args):
        split["between layers"] += 1
        return hand_over(*args)

    Req.__init__, rows.split, rows.handed_over = initialized, divided, handed_over
    # The section would require a tokenizer and a model that answers sensibly.
    power = ChunksPower(ext.config, Chunks(link="always"))
    power.open(ext, scheduler)
    ext.add(power)

def probe(self, path, evict=False, host=None):
    from sglang.kernels.ops.attention import decode_attention, extend_attention
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sgl_ext.engine.core import runtime
    ext, runner = runtime.current, self.tp_worker.model_runner
    if hasattr(runner.token_to_kv_pool, "slab"):
        if ext.chunks is None:
            prepare(self, ext)
        self.token_to_kv_pool_allocator.groups.check_integrity()
    if host is not None and ext.restore is not None:
        ext.restore.section = ext.restore.section.model_copy(update={"host": host})
    if evict and ext.tiers is not None:
        self.tree_cache.evict(EvictParams(num_tokens=self.tree_cache.evictable_size()))
    kernels = extend_attention._fwd_kernel, decode_attention._fwd_grouped_kernel_stage1
    state = {"backend": type(runner.attn_backend).__name__,
             "kernels": [type(kernel).__name__ for kernel in kernels],
             "strides": runner.token_to_kv_pool.get_key_buffer(1).stride(),
             "split": dict(split),
             "protected": self.tree_cache.protected_size(),
             "plans": len({*ext.plans} - {"rows"})}
    forget()
    json.dump(state, open(path, "w"))

# Schedulers import this file before their arguments arrive.
Scheduler.probe = probe

def play(model, state, options, script):
    engine = Engine(model_path=model, dtype="float32", log_level="warning", enable_ext=True,
                    skip_tokenizer_init=True, chunked_prefill_size=256,
                    max_running_requests=8, **options)

    swaps = "swap" in options.get("ext_config", {})

    async def ask(step, begun):
        if urgent := step.get("urgent", False):
            await begun.wait()
        request = GenerateReqInput(
            rid=step.get("rid"), input_ids=step["ids"], extra_key=step.get("extra_key"),
            return_logprob=True, stream=step.get("stream", False),
            priority=5 if urgent and swaps else None,
            sampling_params={"temperature": 0, "max_new_tokens": step.get("new", 4),
                             "ignore_eos": True, "custom_params": step.get("custom_params")})
        async for answer in engine.tokenizer_manager.generate_request(request):
            begun.set()
            meta = answer["meta_info"]
        return {"ids": answer["output_ids"], "ext": meta.get("ext") or [],
                "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
                "cached": meta.get("cached_tokens_details") or {}}

    async def together(steps):
        begun = asyncio.Event()
        return await asyncio.gather(*(ask(step, begun) for step in steps))

    def look(**change):
        engine.collective_rpc("probe", path=state, **change)
        return json.load(open(state))

    for _, change, steps in script:
        look(**change)
        answers = engine.loop.run_until_complete(together(steps))
        live = engine.get_server_info()["internal_states"][0].get("sgl_ext", {})
        print(json.dumps({"answers": answers, "live": live, **look()}), flush=True)
    engine.shutdown()

def main():
    model, state, runs = json.load(open(sys.argv[1]))
    for options, script in runs:
        play(model, state, options, script)

if __name__ == "__main__":
    main()
"""


def make_model(folder: Path) -> Path:
    """Saves a model of random weights with grouped queries, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=2 * KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=4096, initializer_range=0.1,  # attention that is not uniform
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def play(
    model: Path,
    runs: Sequence[tuple[Mapping[str, object], Sequence[Group]]],
    folder: Path,
    template: Template = template,
    environment: Mapping[str, str] | None = None,
) -> list[Run]:
    """Returns what each engine answered.

    Args:
        runs: arguments of each engine, and the groups of requests that it gets.
        template: process from which the program is forked.
        environment: its variables, beside those of this process.
    """
    asked = [str(model), str(folder / "state"), runs]
    variables = CHECKED | dict(environment or {})
    found, _ = run_program(folder, PROGRAM, asked, template=template, environment=variables)
    each = iter(found)
    return [{name: next(each) for name, *_ in script} for _, script in runs]


def interpreting() -> Template:
    """Returns a process that has imported SGLang with interpreted kernels; the caller closes it."""
    return Template(TRITON_INTERPRET="1")
