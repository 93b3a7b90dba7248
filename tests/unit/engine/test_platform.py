"""Conditions under which the CPU platform is active, and the defaults that it sets."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.cpu import platform
from sgl_ext.plugin import activate_cpu_platform


def test_platform_is_active_without_an_accelerator() -> None:
    assert activate_cpu_platform() == "sgl_ext.engine.cpu.platform:NativeCpuPlatform"


def test_platform_is_inactive_with_cuda_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activate_cpu_platform() is None
    assert platform.reason_inactive() == "torch has the accelerator 'cuda'"
    # SGLANG_PLATFORM activates it nevertheless: SGLang then loads no other platform.
    monkeypatch.setenv("SGLANG_PLATFORM", platform.PLATFORM_NAME)
    assert activate_cpu_platform() is not None


def test_platform_is_inactive_with_sglangs_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate_cpu_platform() is None


def test_platform_is_inactive_with_another_sglang_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform.hooks, "installed_sglang", lambda: "0.5.24")
    assert platform.reason_inactive() == "it requires SGLang 0.5.22 or 0.5.23, found 0.5.24"


def test_platform_is_inactive_with_another_platform_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        EntryPoint(platform.PLATFORM_NAME, "x:y", "sglang.srt.platforms"),
        EntryPoint("vendor", "x:y", "sglang.srt.platforms"),
    ]
    monkeypatch.setattr(platform, "entry_points", lambda group: others)  # noqa: ARG005
    assert platform.reason_inactive() == (
        "the platform plugin 'vendor' is installed (SGLang supports only one)"
    )


@pytest.mark.parametrize(
    ("changed", "quantized", "float32"),
    [
        ({}, None, True),
        ({"dtype": "bfloat16"}, None, False),
        ({"hicache_storage_backend": "file"}, None, False),
        ({"quantization": "fp8"}, None, False),
        ({}, {"quant_method": "gptq"}, False),
    ],
)
def test_float32_is_the_default_where_bfloat16_is_emulated(
    changed: dict[str, object],
    quantized: dict[str, object] | None,
    float32: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if quantized:
        config["quantization_config"] = quantized
    (tmp_path / "config.json").write_text(json.dumps(config))
    view = {
        "dtype": "auto", "hicache_storage_backend": None, "quantization": None,
        "model_path": str(tmp_path), "trust_remote_code": False, "revision": None,
    }  # fmt: skip
    for emulated in (True, False):
        monkeypatch.setattr(platform, "computes_bfloat16", lambda: not emulated)  # noqa: B023
        wanted = platform._wants_float32(SimpleNamespace(**view | changed))
        assert wanted is (float32 and emulated)
    monkeypatch.setattr(platform, "computes_bfloat16", lambda: False)
    assert platform._wants_float32(SimpleNamespace(**view | {"model_path": "/no/such"}))


def test_thread_binding_is_in_sglangs_format() -> None:
    assert platform.thread_binding(2, [0, 1]) == "0|1"
    assert platform.thread_binding(2, [0, 1, 2, 3]) == "0,1|2,3"
    assert platform.thread_binding(3, [4, 5]) == "4|5|4"


def test_binding_of_an_earlier_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform._BINDING, raising=False)
    platform._bind_threads(3)
    assert platform.os.environ[platform._BINDING].count("|") == 2
    platform._bind_threads(2)
    assert platform.os.environ[platform._BINDING].count("|") == 1
    platform._bind_threads(1)
    assert platform._BINDING not in platform.os.environ
    monkeypatch.setenv(platform._BINDING, "1|0")
    platform._bind_threads(2)
    assert platform.os.environ[platform._BINDING] == "1|0"


@given(st.integers(1, 16), st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True))
def test_every_rank_gets_cores_and_no_core_stays_unused(ranks: int, cores: list[int]) -> None:
    groups = [group.split(",") for group in platform.thread_binding(ranks, cores).split("|")]
    assert len(groups) == ranks
    given_out = [int(core) for group in groups for core in group]
    assert set(given_out) <= set(cores)
    if ranks <= len(cores):
        assert given_out == cores
        sizes = [len(group) for group in groups]
        assert max(sizes) - min(sizes) <= 1
