"""Pools that SGLang builds elsewhere: sections that need the slab say so in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext import runtime
from sgl_ext.config import load
from sgl_ext.engine import activation, kv_memory, peer_hooks
from sgl_ext.engine.hooks import ActivationError


@pytest.fixture
def minimax() -> Any:
    """What SGLang's configurator builds for MiniMax's sparse attention elsewhere."""
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    architectures = ["MiniMaxM3SparseForCausalLM"]
    return (
        SimpleNamespace(token_to_kv_pool=object.__new__(MiniMaxSparseKVPool)),
        SimpleNamespace(
            is_draft_worker=False,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=architectures)),
        ),
    )


def test_a_pool_without_a_hook_of_its_own_is_named(
    minimax: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pools, configurator = minimax
    because = "the slab does not serve the pool MiniMaxSparseKVPool of MiniMaxM3SparseForCausalLM"
    config: dict[str, Any] = {"peer": {"role": "worker", "directory": str(tmp_path)}}
    monkeypatch.setattr(runtime, "current", ext := runtime.ExtRuntime(load(config)))
    assert kv_memory._pools_built(pools, configurator) is pools
    assert ext.describe_memory() == {"layout": "layer_major", "because": because}
    with pytest.raises(ActivationError, match=f"and {because}: leave out peer"):
        peer_hooks._open(SimpleNamespace())
    monkeypatch.setattr(runtime, "current", ext := runtime.ExtRuntime(load({})))
    configurator.is_draft_worker = True  # whose pool is not the model's
    kv_memory._pools_built(pools, configurator)
    assert ext.layer_major_because is None


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_a_layout_is_what_was_asked_for(
    minimax: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ext = runtime.ExtRuntime(load({"memory": {"layout": layout}}))
    monkeypatch.setattr(runtime, "current", ext)
    monkeypatch.setattr(activation, "commanded", True)
    if layout == "layer_major":
        kv_memory._pools_built(*minimax)
        assert ext.layer_major_because == "the configuration asks for it"
    else:
        with pytest.raises(SystemExit, match=r"sgl_ext: the block-major .* MiniMaxSparseKVPool"):
            kv_memory._pools_built(*minimax)
