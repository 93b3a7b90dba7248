"""Tests of the launcher's checks before anything is loaded; ``test_start`` tests the refusals."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
import torch
from sglang.srt.arg_groups import model_override_base, overrides
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, Phase, with_phase

from sgl_ext.config import SECTIONS, load
from sgl_ext.engine.core import releases, served
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.launch import start_checks

HOST = {"host": {"capacity": "64MiB"}}
FULL_PREFILL = with_phase(CudaGraphConfig(), Phase.PREFILL, backend=Backend.FULL)


def arguments(**changed: object) -> SimpleNamespace:
    fields = {
        "model_path": "a/model", "load_format": "auto", "revision": None, "device": "cpu",
        "kv_cache_dtype": "auto", "enable_kv_cache_sharding": False, "enable_memory_saver": False,
        "enable_hisparse": False, "dcp_size": 1, "prefill_only_disable_kv_cache": False,
        "disaggregation_mode": "null", "disable_radix_cache": False, "page_size": 16,
        "chunked_prefill_size": 2048, "tp_size": 1, "attention_backend": "torch_native",
        "prefill_attention_backend": None, "decode_attention_backend": None,
        "enable_unified_memory": False, "kv_canary": "none", "attn_dp_size": 1, "pp_size": 1,
        "enable_torch_compile": False, "enable_two_batch_overlap": False, "enable_pdmux": False,
        "cuda_graph_config": CudaGraphConfig(),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changed))


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fakes SGLang's resolution of :func:`arguments`. Returns the model, a Gemma in float32."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["GemmaForCausalLM"]), dtype=torch.float32,
        head_dim=64, v_head_dim=64, num_hidden_layers=30, get_num_kv_heads=lambda size: 3 // size,
        hf_text_config=SimpleNamespace(num_experts=None), quantization=None,
    )  # fmt: skip
    monkeypatch.setattr(overrides, "resolving_view", lambda arguments: arguments)
    monkeypatch.setattr(model_override_base, "model_config_of", lambda _arguments: model)
    return model


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the slab and all powers available on CUDA."""
    for known in ("READY", "TRIED"):
        monkeypatch.setattr(served, known, dict.fromkeys(("cpu", "cuda"), frozenset(SECTIONS)))
    monkeypatch.delenv(served.PAGED_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("config", "changed", "reason"),
    [
        ({"tiers": HOST, "restore": {"chunk": 24}}, {}, "restore.chunk is 24 .* set it to 32"),
        ({"tiers": HOST, "restore": {}}, {"chunked_prefill_size": -1}, "-size is -1; set it to 16"),
        ({"tiers": HOST}, {"disable_radix_cache": True}, "tiers require the radix cache"),
        ({"tiers": HOST}, {"page_size": 4096}, "host.capacity is 64MiB.* 4096 tokens.*188,747,776"),
        (
            {"tiers": HOST, "swap": {"capacity": "512KiB"}}, {},
            "swap.capacity is 512KiB, but one page of 16 tokens takes 741,376 B; raise it",
        ),
        ({"tiers": HOST}, {"kv_cache_dtype": "fp8_e4m3"}, "^tiers requires .* type fp8_e4m3; rem"),
        ({"tiers": HOST, "memory": {"layout": "layer_major"}}, {}, "support memory.layout layer_"),
        ({"memory": {"layout": "block_major"}}, {"enable_memory_saver": True}, "-memory-saver; r"),
        (
            {"clusters": {"directories": ["/tmp"]}}, {"decode_attention_backend": "triton"},
            "decode runs triton; use --attention-backend torch_native for both phases, or remove",
        ),
        (
            {"peer": {"role": "master", "directory": "/tmp/p", "capacity": "1MiB",
                      "stream": "layer"}},
            {"attention_backend": "triton"}, "prefill runs triton.* or remove peer.stream layer",
        ),
        ({"chunks": {}}, {"attention_backend": "flashinfer"}, "^chunks computes.* flashinfer is"),
        ({"chunks": {}}, {}, "chunks: the models Llama.*not GemmaForCausalLM"),
    ],
)  # fmt: skip
def test_resolved_arguments_that_are_not_served_are_refused(
    config: Mapping[str, object], changed: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(ActivationError, match=reason):
        start_checks.require_resolved(arguments(**changed), load(config))


@pytest.mark.parametrize(
    ("method", "layers", "tp_size", "reason"),
    [
        ("blend-9", 2, 1, "this model has 2 layers"),
        ("blend-9", 30, 2, "across ranks"),
        ("query-9", 30, 2, "across ranks"),
        ("primed+query-9", 30, 2, "across ranks"),
    ],
)
def test_methods_are_refused_where_they_cannot_select_tokens(
    model: SimpleNamespace, method: str, layers: int, tp_size: int, reason: str
) -> None:
    model.hf_config.architectures, model.num_hidden_layers = ["LlamaForCausalLM"], layers
    named = re.escape(f"chunks.method {method}: ")
    with pytest.raises(ActivationError, match=f"^{named}.*{reason}.*choose another"):
        start_checks.require_resolved(
            arguments(tp_size=tp_size), load({"chunks": {"method": method}})
        )
    start_checks.require_resolved(arguments(tp_size=tp_size), load({"chunks": {}}))


@pytest.mark.parametrize(
    "lower",
    [{"ssd": {"directories": ["/tmp"], "capacity": "1GiB"}}, {"remote": {"master": "localhost:1"}}],
)
def test_stored_kv_of_images_with_short_keys_is_refused(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lower: Mapping[str, object]
) -> None:
    config = load({"tiers": {**HOST, **lower}})
    monkeypatch.setattr(releases, "MEDIA_BY_WIDE_HASH", False)
    model.is_multimodal = True
    start_checks.require_resolved(arguments(), load({"tiers": HOST}))
    refused = "^the ssd and remote tiers do not .* 30 bits of an image's hash, .*; install a newer"
    with pytest.raises(ActivationError, match=refused):
        start_checks.require_resolved(arguments(), config)
    model.is_multimodal = False
    start_checks.require_resolved(arguments(), config)
    monkeypatch.setattr(releases, "MEDIA_BY_WIDE_HASH", True)
    model.is_multimodal = True
    start_checks.require_resolved(arguments(), config)


def test_the_arguments_are_those_of_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    assert set(vars(arguments())) <= set(ServerArgs.__struct_fields__)


def test_resolved_arguments_that_are_served_pass() -> None:
    start_checks.require_resolved(
        arguments(), load({"tiers": HOST, "restore": {"chunk": 32}, "swap": {"capacity": "1MiB"}})
    )
    # SGLang's own pool is used if no section needs the slab.
    start_checks.require_resolved(arguments(enable_memory_saver=True), load({}))


SECTION: dict[str, dict[str, object]] = {
    "tiers": {"tiers": HOST},
    "restore": {"tiers": HOST, "restore": {"chunk": 32}},
    "swap": {"swap": {"capacity": "1MiB"}},
    "chunks": {"chunks": {}},
    "peer": {"peer": {"role": "worker", "directory": "/tmp/p"}},
    "clusters": {"clusters": {"directories": ["/tmp"]}},
}


@pytest.mark.parametrize("power", SECTION)
@pytest.mark.parametrize("device", ["cuda", "xpu", "npu", "cuda:1", "rocm"])
def test_no_power_is_served_on_another_device_than_the_cpu(
    power: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = device.partition(":")[0]
    if device == "rocm":
        monkeypatch.setattr(torch.version, "hip", "7.0")
        device = "cuda"
    first = next(iter(load(SECTION[power]).sections()))
    why = f"is not implemented for the device {named}; serve on"
    if first in served.READY.get(named, ()):
        why = f"on the device {named} has only been run on a simulated device, .* SGLEXT_UNTRIED=1"
    with pytest.raises(ActivationError, match=f"^{first} {why} .*remove {first}$"):
        start_checks.require_resolved(
            arguments(device=device, attention_backend="triton"), load(SECTION[power])
        )
    block_major = load({"memory": {"layout": "block_major"}})
    if named in served.SLAB_DEVICES:
        start_checks.require_resolved(
            arguments(device=device, attention_backend="triton"), block_major
        )
        return
    refused = f"layout, which does not support the device {named}; remove memory.layout block_major"
    with pytest.raises(ActivationError, match=refused):
        start_checks.require_resolved(arguments(device=device), block_major)


def test_a_power_that_never_ran_on_a_gpu_starts_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(served.UNTRIED, "1")
    start_checks.require_resolved(
        arguments(device="cuda", attention_backend="triton"), load(SECTION["tiers"])
    )


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "KV of type fp8_e5m2"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "KV of type fp4_e2m1"),
        ({"attn_dp_size": 2, "tp_size": 2}, "data-parallel attention on cuda"),
        ({"tp_size": 2}, "tensor parallelism on cuda"),
        ({"pp_size": 2}, "pipeline parallelism on cuda"),
        ({"enable_torch_compile": True}, "--enable-torch-compile on cuda"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap on cuda"),
        ({"enable_pdmux": True}, "--enable-pdmux on cuda"),
        ({"cuda_graph_config": FULL_PREFILL}, "full prefill CUDA graphs on cuda"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"kv_canary": "raise"}, "--kv-canary"),
        ({"quantization": "fp8"}, r"quantized weights \(fp8\) on cuda"),
        ({"num_experts": 64}, r"mixtures of experts \(num_experts 64\) on cuda"),
        ({"n_routed_experts": 64}, r"mixtures of experts \(n_routed_experts 64\) on cuda"),
        ({"moe_num_experts": 64}, r"mixtures of experts \(moe_num_experts 64\) on cuda"),
        ({"num_local_experts": 8}, r"mixtures of experts \(num_local_experts 8\) on cuda"),
        ({"POST_CAPTURE_KV_SIZING": "1"}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING on cuda"),
    ],
)
def test_what_has_not_been_tried_on_cuda_is_refused(
    changed: dict[str, object],
    reason: str,
    model: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_the_model = {key: changed[key] for key in changed if "experts" in key}
    model.hf_text_config.__dict__.update(of_the_model)
    model.quantization = changed.get("quantization")
    if "POST_CAPTURE_KV_SIZING" in changed:
        monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    names = set(changed) & set(vars(arguments()))
    view = arguments(
        **{"device": "cuda", "attention_backend": "triton"}
        | {name: changed[name] for name in names}
    )
    with pytest.raises(
        ActivationError,
        match=f"^tiers requires the block-major KV layout, which does not support {reason}; "
        "remove tiers from the configuration, or change that setting$",
    ):
        start_checks.require_resolved(view, load({"tiers": HOST}))
    if reason.endswith(" on cuda"):
        view.device, view.attention_backend = "cpu", "torch_native"
        start_checks.require_resolved(view, load({"tiers": HOST}))


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("power", SECTION)
@pytest.mark.parametrize("backend", ["triton", "fa3", "fa4", "trtllm_mha", "hpc_ops"])
def test_backends_on_cuda_are_served_or_refused_by_their_properties(
    power: str, backend: str, model: SimpleNamespace
) -> None:
    model.hf_config.architectures = ["LlamaForCausalLM"]
    view = arguments(device="cuda", attention_backend=backend)
    refused = None
    if backend == "hpc_ops" and power in ("restore", "chunks"):
        refused = "computes parts of a prompt .* hpc_ops is not known .*backend triton, fa3, fla"
    elif backend in ("fa4", "hpc_ops"):
        refused = f"and {backend} in prefill is not known .*; use --attention-backend triton, fa3,"
    if power in ("restore", "swap") and backend in ("fa4", "hpc_ops"):
        refused = f"^tiers requires .* {backend} in prefill"
    with pytest.raises(ActivationError, match=refused) if refused else nullcontext():
        start_checks.require_resolved(view, load(SECTION[power]))


@pytest.mark.usefixtures("on_cuda")
def test_flashinfer_gets_a_paged_prefill_for_powers_that_require_it(
    model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "environ", environment := dict(os.environ))
    model.hf_config.architectures = ["LlamaForCausalLM"]
    flashinfer = arguments(device="cuda", attention_backend="flashinfer")
    split = arguments(
        device="cuda", attention_backend="flashinfer", prefill_attention_backend="fa3"
    )
    caplog.set_level("INFO")
    start_checks.require_resolved(flashinfer, load(SECTION["tiers"]))
    start_checks.require_resolved(split, load(SECTION["chunks"]))
    assert served.PAGED_VARIABLE not in environment
    assert not caplog.messages
    for _ in range(2):  # a second engine of the process
        start_checks.require_resolved(flashinfer, load(SECTION["chunks"]))
        assert environment[served.PAGED_VARIABLE] == "True"
    assert caplog.messages == [
        "SGLANG_FLASHINFER_USE_PAGED=1 is set, because chunks requires the paged prefill of "
        "flashinfer"
    ]
    environment[served.PAGED_VARIABLE] = "0"
    with pytest.raises(ActivationError, match=r"^restore requires the paged .* unset the variable"):
        start_checks.require_resolved(flashinfer, load(SECTION["restore"]))


def test_models_without_complete_weights_are_refused(tmp_path: Path) -> None:
    named = arguments(model_path=str(tmp_path))
    start_checks.require_startable(named, load({}))  # there is no model, which SGLang reports
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ActivationError, match=r"lacks weights \(\*\.safetensors"):
        start_checks.require_startable(named, load({}))
    start_checks.require_startable(
        arguments(model_path=str(tmp_path), load_format="dummy"), load({})
    )
    (tmp_path / "a.bin").touch()
    start_checks.require_startable(named, load({}))
    shards = {"weight_map": {"one": "a.bin", "two": "b.bin"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    with pytest.raises(ActivationError, match=r"lacks b\.bin; copy or convert"):
        start_checks.require_startable(named, load({}))


def test_an_unreachable_hub_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    cached: dict[str, str] = {}

    def unreachable(url: str, **_kw: object) -> None:
        asked.append(url)
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, *_args, **_kw: cached.get(name)
    )
    with pytest.raises(ActivationError, match=r"neither a local folder.*cannot be reached"):
        start_checks.require_startable(arguments(), load({}))
    assert len(asked) == 1
    for name in ("dummy", "s3://bucket/model"):
        start_checks.require_startable(arguments(model_path=name), load({}))
    cached["a/model"] = str(tmp_path)
    start_checks.require_startable(arguments(), load({}))
    assert len(asked) == 1


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    config = load({"clusters": {"directories": [str(tmp_path / "none")]}})
    with pytest.raises(ActivationError, match=r"clusters directory \S+/none: does not exist"):
        start_checks.require_startable(arguments(model_path=str(tmp_path)), config)


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("attention_backend", "decode_attention_backend"):
        with pytest.raises(ActivationError, match="triton needs a GPU, but the device is cpu; use"):
            start_checks.require_resolved(arguments(**{name: "triton"}), load({}))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    start_checks.require_resolved(arguments(attention_backend="triton"), load({}))
