"""Powers that change what attention reads are refused on backends that do not support them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_ext.bench.harness.attention_trial import AttentionTrial, Geometry, Row
from sgl_ext.config import ExtConfig
from sgl_ext.engine.chunks.power import ChunksPower
from sgl_ext.engine.clusters import geometry as stored_geometry
from sgl_ext.engine.core import activation, dispatch, runtime, served
from sgl_ext.engine.core.attention_backends import (
    configured,
    require_own,
    require_running,
    running,
)
from sgl_ext.engine.core.served import PAGED, Property
from sgl_ext.engine.cpu.attention import CpuAttnBackend
from sgl_ext.engine.restore.power import RestorePower
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout

LAYOUT = Layout(16, layers=1, kv_heads=2, head_dim=64, dtype="float32", fingerprint="none")


def made(kind: type, **fields: Any) -> Any:
    """Returns an instance of ``kind`` that has these fields only; its constructor is not called."""
    backend = object.__new__(kind)
    backend.__dict__.update(fields)
    return backend


def own(kernels: str = "native") -> CpuAttnBackend:
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=None, token_to_kv_pool=None, model=torch.nn.Module(),
        model_config=SimpleNamespace(),
    )  # fmt: skip
    return CpuAttnBackend(runner, kernels=kernels)


def hybrid(prefill: Any, decode: Any) -> Any:
    return made(HybridAttnBackend, prefill_backend=prefill, decode_backend=decode)


def runner(backend: Any, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    return SimpleNamespace(**{"attn_backend": backend, "dtype": dtype, "device": "cpu"} | fields)


TRITON, FLASHINFER = made(TritonAttnBackend), made(FlashInferAttnBackend)
STOCK = made(TorchNativeAttnBackend)


CHUNKS = {Property.STORES_FIRST: "chunks"}
CLUSTERS = {Property.OWN: "clusters"}


@pytest.mark.parametrize(
    ("both", "prefill", "decode", "required", "refused"),
    [
        (None, None, None, CHUNKS | CLUSTERS, None),
        ("torch_native", None, None, CHUNKS | CLUSTERS, None),
        ("triton", None, None, CHUNKS, None),
        ("triton", None, None, CLUSTERS, "prefill runs triton; use --attention-backend tor"),
        ("torch_native", None, "triton", CLUSTERS, "decode runs triton"),
        ("flashinfer", None, None, CHUNKS, "and flashinfer is not known to do so; use --pre"),
        ("flashinfer", "triton", None, CHUNKS, None),
        ("flashinfer", None, None, {}, None),
    ],
)
def test_arguments_that_name_unsupported_backends_are_refused(
    both: str | None, prefill: str | None, decode: str | None,
    required: dict[Property, str], refused: str | None,
) -> None:  # fmt: skip
    view = SimpleNamespace(
        device="cpu", attention_backend=both, prefill_attention_backend=prefill,
        decode_attention_backend=decode,
    )  # fmt: skip
    reason = served.unsuited("cpu", configured(view), required)
    assert reason is None if refused is None else re.search(refused, reason or "")


def test_running_returns_the_prefill_and_decode_backends() -> None:
    assert running(runner(TRITON)) == (TRITON, TRITON)
    assert running(runner(hybrid(STOCK, TRITON))) == (STOCK, TRITON)
    assert running(runner(STOCK, decode_attn_backend=TRITON)) == (STOCK, TRITON)


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        (own(), "cpu"), (STOCK, "cpu"), (TRITON, "cpu"), (hybrid(STOCK, FLASHINFER), "cpu"),
        (STOCK, "cuda"), (TRITON, "cuda"), (made(TRTLLMHAAttnBackend), "cuda"),
        *((made(FlashInferAttnBackend, **{attribute: True}), "cuda") for attribute in PAGED),
    ],
)  # fmt: skip
def test_backends_that_store_kv_first_are_accepted(backend: Any, device: str) -> None:
    require_running(runner(backend, device=device), CHUNKS)


@pytest.mark.parametrize("wrapped", [False, True])
def test_ragged_prefill_is_refused_with_its_reason(wrapped: bool) -> None:
    ragged = made(FlashInferAttnBackend, **dict.fromkeys(PAGED, False))
    where = runner(hybrid(ragged, TRITON) if wrapped else ragged, device="cuda")
    reason = r"FlashInferAttnBackend is not known to do so \(its ragged prefill attends first; set "
    with pytest.raises(ExtError, match=reason + "SGLANG_FLASHINFER_USE_PAGED=1"):
        require_running(where, CHUNKS)
    require_running(where, {Property.STRIDED: "tiers"})


def test_a_slab_requires_backends_that_read_with_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    slab: Any = SimpleNamespace(device=None)
    monkeypatch.setattr(runtime, "current", runtime.ExtRuntime(ExtConfig(), slab=slab))
    monkeypatch.setattr(activation, "commanded", True)
    for backend in (made(TboAttnBackend), hybrid(TRITON, made(TboAttnBackend))):
        scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner(backend)))
        with pytest.raises(
            SystemExit, match=r"the block-major KV layout requires .* TboAttnBackend"
        ):
            dispatch._ready(dict, scheduler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (FLASHINFER, "FlashInferAttnBackend"),
        (hybrid(FLASHINFER, TRITON), "FlashInferAttnBackend"),
        (made(TboAttnBackend), "TboAttnBackend"),
    ],
)
def test_backends_not_known_to_store_kv_first_are_refused(backend: Any, named: str) -> None:
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner(backend)))
    tiers = {"tiers": {"host": {"capacity": "1MiB"}}}
    for kind in (ChunksPower, RestorePower):
        config = ExtConfig.model_validate({**tiers, kind.name: {}})
        power: Any = kind(config, getattr(config, kind.name))
        with pytest.raises(ExtError, match=rf"^{kind.name} computes .*, and {named} is not known"):
            power.open(runtime.ExtRuntime(config), scheduler)


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        (TRITON, "prefill runs TritonAttnBackend"),
        (STOCK, "prefill runs TorchNativeAttnBackend"),
        (hybrid(own(), TRITON), "decode runs TritonAttnBackend"),
        (hybrid(TRITON, own()), "prefill runs TritonAttnBackend"),
        (own("torch"), "is disabled or does not support queries of float32"),
    ],
)
def test_require_own_refuses_all_but_the_compiled_cpu_attention(backend: Any, found: str) -> None:
    with pytest.raises(ExtError, match=f"{found}.*remove clusters"):
        require_own(runner(backend), LAYOUT, 1.0, "clusters")


def test_compiled_cpu_attention_is_accepted_for_supported_dtypes() -> None:
    require_own(runner(own()), LAYOUT, 1.0, "clusters")
    require_own(runner(hybrid(own(), own())), LAYOUT, 1.0, "clusters")
    with pytest.raises(ExtError, match="queries of bfloat16 over KV of float32 with head_dim 64"):
        require_own(runner(own(), torch.bfloat16), LAYOUT, 1.0, "clusters")


def test_stored_contexts_require_the_compiled_cpu_attention() -> None:
    model = torch.nn.Module()
    model.layer = RadixAttention(4, 64, 0.125, 2, 0)
    for backend in (own(), TRITON):
        scheduler = SimpleNamespace(
            model_config=SimpleNamespace(),
            tp_worker=SimpleNamespace(model_runner=runner(backend, model=model)),
        )
        if backend is TRITON:
            with pytest.raises(ExtError, match="prefill runs TritonAttnBackend"):
                stored_geometry.geometry_of(scheduler, LAYOUT)
        else:
            assert stored_geometry.geometry_of(scheduler, LAYOUT).heads == 4


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("sliding_window_size", 64, "sliding windows or capped"),
        ("logit_cap", 30.0, "sliding windows or capped"),
        ("attn_type", AttentionType.DECODER_BIDIRECTIONAL, "sinks, to later tokens"),
        ("xai_temperature_len", 8, "with a temperature"),
        (None, None, "attention with sinks"),
    ],
)
def test_attention_that_is_no_plain_softmax_over_earlier_tokens_is_refused(
    field: str | None, value: object, named: str
) -> None:
    model = torch.nn.Module()
    model.layer = RadixAttention(4, 64, 0.125, 2, 0)
    config = SimpleNamespace(has_attention_sinks=False)
    scheduler: Any = SimpleNamespace(
        model_config=config, tp_worker=SimpleNamespace(model_runner=runner(TRITON, model=model))
    )
    assert stored_geometry.geometry_of(scheduler, LAYOUT, on_device=True).kv_heads == 2
    if field is None:
        config.has_attention_sinks = True
    else:
        setattr(model.layer, field, value)
    with pytest.raises(ExtError, match=named):
        stored_geometry.geometry_of(scheduler, LAYOUT, on_device=True)


@pytest.mark.parametrize("name", ["ours", "gathering", "stock"])
def test_rows_that_alias_a_request_see_kv_of_the_same_forward(name: str) -> None:
    geometry = Geometry(dtype=torch.float32)
    outs = []
    for rows in ([Row(0, 8, 24)], [Row(0, 8, 10), Row(0, 18, 14)]):
        trial = AttentionTrial(geometry, [32])
        backend = getattr(trial, name)
        query = trial.query(rows)
        keys, values = (trial.query(rows).view(24, 9, 64)[:, :3] for _ in range(2))
        batch = trial._batch(ForwardMode.EXTEND, rows)
        batch.out_cache_loc = trial.ours.req_to_token_pool.req_to_token[0, 8:32].long()
        backend.init_forward_metadata(batch)
        outs.append(backend.forward_extend(query, keys, values, trial.layers[0], batch))
    torch.testing.assert_close(*outs, atol=2e-6, rtol=2e-6)
