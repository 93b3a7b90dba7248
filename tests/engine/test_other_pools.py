"""Tests of models with other KV pools than the slab: sections that need the slab are refused.

The models are tiny, have random weights, and are those that SGLang starts on a CPU. Each scheduler
is forked from one process that has imported SGLang. SGLang has no MiniMax pool for out-of-tree
platforms, and its DeepSeek needs compiled kernels: their pools are tested at the configurator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.config import load
from sgl_ext.engine.core import activation, dispatch, planning, runtime
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.kv import install as kv_memory

BASE = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "SWAKVPool of GptOssForCausalLM": {
        "model_type": "gpt_oss", "head_dim": 16, "sliding_window": 32, "num_local_experts": 2,
        "layer_types": ["sliding_attention", "full_attention"], "num_experts_per_tok": 1,
    },
    "HybridLinearKVPool of Lfm2ForCausalLM": {
        "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
        "conv_dim": 64, "block_dim": 64, "block_ff_dim": 128, "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 16,
    },
}  # fmt: skip
_GEMMA = {
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
WINDOWED = BASE | _GEMMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 10000.0,
}  # fmt: skip
"""Model with sliding windows whose KV SGLang keeps in a pool of full attention."""
CAPPED = BASE | _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2",
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip

BACKENDS = {"SWAKVPool of GptOssForCausalLM": "triton"}
"""Attention backends that SGLang requires for some of the models; no forward runs."""

PROGRAM = """
import json, os, signal, sys, traceback

import sglang.srt.managers.scheduler as module
import sglang.srt.models.registry  # imports all models, before the fork
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import PortArgs, ServerArgs

from sgl_ext.config import load
from sgl_ext.engine.clusters.power import ClustersPower
from sgl_ext.engine.core import activation
from sgl_ext.engine.core import scheduler
from sgl_ext.engine.launch import start_checks

# The launcher refuses clusters with the backend that SGLang demands of one of the models. What a
# scheduler finds of its pool is tested here.
start_checks._require_attention = lambda *_: None
# Neither have the models a tokenizer.
ClustersPower.unserved = [
    each for each in ClustersPower.unserved if each[0] != "skip_tokenizer_init"
]

class Pipe:
    def send(self, info):
        raise SystemExit(json.dumps(info["sgl_ext"]["memory"]))

def start(path, backend, config):
    activation.commanded = True
    args = ServerArgs(model_path=path, load_format="dummy", skip_tokenizer_init=True, device="cpu",
                      max_total_tokens=1024, dtype="float32", page_size=1, log_level="error",
                      attention_backend=backend, max_mamba_cache_size=8,
                      disable_overlap_schedule=True)
    config = load(config)
    setattr(args, activation.CARRIED, activation.Carried(config))
    args.resolve_once()
    ports = PortArgs.init_new(args)
    scheduler.activate(config)
    module.run_scheduler_process(args, ports, 0, 0, 0, None, Pipe())

signal.signal(signal.SIGQUIT, signal.SIG_IGN)
load_plugins()
for name, path, backend, config in json.load(open(sys.argv[1])):
    read, write = os.pipe()
    if not (child := os.fork()):
        said = "SGLang's own error"
        try:
            start(path, backend, config)
        except SystemExit as end:
            said = str(end)
        except BaseException:
            traceback.print_exc()
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    print(json.dumps([name, config, said]), flush=True)
"""


def folder(path: Path, about: dict[str, Any]) -> str:
    """Makes a folder with the configuration of a model."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(about))
    return str(path)


def test_sections_that_need_the_slab_are_refused_for_other_pools(tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    devices = tmp_path / "devices"
    devices.mkdir(mode=0o700)
    sections: dict[str, dict[str, Any]] = {
        "nothing": {},
        "memory": {"memory": {"layout": "block_major"}},
        "peer": {"peer": {"role": "worker", "directory": str(peers)}},
        "tiers": {"tiers": {"host": {"capacity": "1MiB"}}},
        "clusters": {"clusters": {"directories": [str(devices)]}},
    }
    script = []
    for number, (pool, model) in enumerate(MODELS.items()):
        about = BASE | {"architectures": [pool.split()[-1]]} | model
        path = folder(tmp_path / str(number), about)
        script += [(pool, path, BACKENDS.get(pool), config) for config in sections.values()]
    path = folder(tmp_path / "windowed", WINDOWED)
    script += [("windowed", path, None, sections[each]) for each in ("nothing", "tiers")]
    script += [("capped", folder(tmp_path / "capped", CAPPED), None, sections["nothing"])]
    arguments, program = tmp_path / "arguments.json", tmp_path / "program.py"
    arguments.write_text(json.dumps(script))
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(program), str(arguments)],
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1",
            "SGLANG_DISABLED_MODEL_ARCHS": "",  # tests start without most models
        },
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in result.stdout.splitlines() if line[:2] == '["']
    assert len(lines) == len(script), result.stderr[-3000:]
    (*_, plain), (*_, tiered), (*_, capped) = lines[-3:]
    windows = "the KV slab does not support sliding windows"
    assert json.loads(plain) == {"layout": "layer_major", "because": windows}
    assert "does not support sliding windows" in tiered
    assert "does not support attention logits capped at 50.0" in capped
    for (pool, config, said), section in zip(lines[:-3], list(sections) * len(MODELS), strict=True):
        because = f"the KV slab does not support the pool {pool}"
        if section == "nothing":
            assert json.loads(said) == {"layout": "layer_major", "because": because}
        else:
            assert said.startswith("sgl_ext: "), (pool, config, said, result.stderr[-3000:])
            assert "\n" not in said
            assert because.removeprefix("the KV slab ") in said


OTHERS = {
    "MiniMaxSparseKVPool": "MiniMaxM3SparseForCausalLM",
    "MLATokenToKVPool": "DeepseekV2ForCausalLM",
    "DSATokenToKVPool": "DeepseekV32ForCausalLM",
}


@pytest.fixture(params=[*OTHERS.items()], ids=[*OTHERS])
def built(request: pytest.FixtureRequest) -> Any:
    """Returns pools of SGLang, their configurator, and the reason why there is no slab."""
    from sglang.srt.mem_cache import memory_pool

    pool, model = request.param
    return (
        SimpleNamespace(token_to_kv_pool=object.__new__(getattr(memory_pool, pool))),
        SimpleNamespace(
            is_draft_worker=False,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[model])),
        ),
        f"the KV slab does not support the pool {pool} of {model}",
    )


def test_refusals_name_pools_that_have_no_hook_of_their_own(
    built: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pools, configurator, because = built
    config: dict[str, Any] = {"peer": {"role": "worker", "directory": str(tmp_path)}}
    monkeypatch.setattr(runtime, "current", ext := runtime.ExtRuntime(load(config)))
    assert kv_memory._pools_built(pools, configurator) is pools
    assert ext.describe_memory() == {"layout": "layer_major", "because": because}
    monkeypatch.setattr(planning, "prepare", lambda *_: None)  # reads SGLang's configuration
    runner = SimpleNamespace(device="cpu")
    scheduler: Any = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    with pytest.raises(ActivationError, match=f"but {because}; remove the peer section"):
        dispatch._ready(dict, scheduler)
    monkeypatch.setattr(runtime, "current", ext := runtime.ExtRuntime(load({})))
    configurator.is_draft_worker = True  # its pool is not that of the served model
    kv_memory._pools_built(pools, configurator)
    assert ext.layer_major_because is None


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_explicit_layouts_are_used_or_refused(
    built: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, configurator, because = built
    ext = runtime.ExtRuntime(load({"memory": {"layout": layout}}))
    monkeypatch.setattr(runtime, "current", ext)
    monkeypatch.setattr(activation, "commanded", True)
    if layout == "layer_major":
        kv_memory._pools_built(pools, configurator)
        assert ext.layer_major_because == "the configuration selects the layer-major layout"
    else:
        served = because.removeprefix("the KV slab ")
        with pytest.raises(SystemExit, match=f"sgl_ext: the block-major KV layout {served};"):
            kv_memory._pools_built(pools, configurator)
