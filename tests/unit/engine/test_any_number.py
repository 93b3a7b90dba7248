"""Forwards with more rows than a backend has buffers for: longer tensors for the time of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill

from sgl_ext.engine.step.rows import any_number

ROWS, MORE = 4, 9


def pointers() -> torch.Tensor:
    return torch.zeros(ROWS + 1, dtype=torch.int32)


def runner_of(backend: object) -> Any:
    return SimpleNamespace(attn_backend=backend)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashInfer's updater of its prefill, over a backend without kernels."""
    parallel = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1)
    monkeypatch.setattr(flashinfer_backend, "get_parallel", lambda: parallel)
    backend = SimpleNamespace(
        kv_indptr=[pointers()], qo_indptr=[pointers()], num_wrappers=1, dispatch_reason=None,
        kv_last_page_len=torch.ones(ROWS, dtype=torch.int32), flashinfer_kv_cache_dtype=None,
        _swa_kv_pool=None, prefill_wrapper_ragged=None,
    )  # fmt: skip
    model = SimpleNamespace(
        get_max_num_attention_heads=lambda: 4, get_num_kv_heads=lambda *_: 2, head_dim=64
    )
    runner = SimpleNamespace(model_config=model, dtype=None, sliding_window_size=None)
    backend.indices_updater_prefill = FlashInferIndicesUpdaterPrefill(runner, backend)
    return backend


def test_flashinfer_gets_longer_tensors_where_its_updater_reads_them(flashinfer: Any) -> None:
    updater = flashinfer.indices_updater_prefill
    before = [updater.kv_indptr[0], updater.qo_indptr[0], updater.kv_last_page_len]
    with any_number(runner_of(flashinfer), MORE):
        for pointer in (updater.kv_indptr[0], updater.qo_indptr[0]):
            assert pointer.dtype == torch.int32
            assert len(pointer) == MORE + 1
            assert pointer[0] == 0
        assert updater.kv_last_page_len[:MORE].tolist() == [1] * MORE
        assert envs.SGLANG_EAGER_INPUT_NO_COPY.get()
    after = [updater.kv_indptr[0], updater.qo_indptr[0], updater.kv_last_page_len]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert not envs.SGLANG_EAGER_INPUT_NO_COPY.get()


def test_tensors_that_are_long_enough_stay() -> None:
    backend = SimpleNamespace(kv_indptr=pointers(), qo_indptr=None)
    before = backend.kv_indptr
    with any_number(runner_of(backend), ROWS):
        assert backend.kv_indptr is before


def test_tensors_are_put_back_after_an_error() -> None:
    backend = SimpleNamespace(kv_indptr=pointers(), qo_indptr=pointers())
    before = backend.kv_indptr, backend.qo_indptr
    with pytest.raises(RuntimeError, match="of a forward"), any_number(runner_of(backend), MORE):
        assert len(backend.qo_indptr) == MORE + 1
        raise RuntimeError("of a forward")
    assert backend.kv_indptr is before[0]
    assert backend.qo_indptr is before[1]
