"""Tests of the launcher's checks before anything is loaded; ``test_start`` tests the refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
import torch
from sglang.srt.arg_groups import model_override_base, overrides

from sgl_ext.config import load
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.launch import start_checks

HOST = {"host": {"capacity": "64MiB"}}


def arguments(**changed: object) -> SimpleNamespace:
    fields = {
        "model_path": "a/model", "load_format": "auto", "revision": None, "device": "cpu",
        "kv_cache_dtype": "auto", "enable_kv_cache_sharding": False, "enable_memory_saver": False,
        "enable_hisparse": False, "dcp_size": 1, "prefill_only_disable_kv_cache": False,
        "disaggregation_mode": "null", "disable_radix_cache": False, "page_size": 16,
        "chunked_prefill_size": 2048, "tp_size": 1, "attention_backend": "torch_native",
        "prefill_attention_backend": None, "decode_attention_backend": None,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changed))


@pytest.fixture(autouse=True)
def _resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes SGLang's resolution of :func:`arguments`, for a Gemma model in float32."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["GemmaForCausalLM"]), dtype=torch.float32,
        head_dim=64, v_head_dim=64, num_hidden_layers=30, get_num_kv_heads=lambda size: 3 // size,
    )  # fmt: skip
    monkeypatch.setattr(overrides, "resolving_view", lambda arguments: arguments)
    monkeypatch.setattr(model_override_base, "model_config_of", lambda _arguments: model)


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
        ({"tiers": HOST}, {"kv_cache_dtype": "fp8_e4m3"}, "^tiers: .* KV of type fp8_e4m3; rem"),
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
        ({"chunks": {}}, {}, "chunks support Llama.*not GemmaForCausalLM"),
    ],
)  # fmt: skip
def test_resolved_arguments_that_are_not_served_are_refused(
    config: Mapping[str, object], changed: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(ActivationError, match=reason):
        start_checks.require_resolved(arguments(**changed), load(config))


def test_resolved_arguments_that_are_served_pass() -> None:
    start_checks.require_resolved(
        arguments(), load({"tiers": HOST, "restore": {"chunk": 32}, "swap": {"capacity": "1MiB"}})
    )
    # SGLang's own pool is used if no section needs the slab.
    start_checks.require_resolved(arguments(enable_memory_saver=True), load({}))


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
