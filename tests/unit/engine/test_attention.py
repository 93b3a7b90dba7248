"""Our CPU attention equals stock ``torch_native`` on random rows of SGLang's KV pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attention_kit import geometries
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_ext.bench.harness.attention_trial import AttentionTrial, Geometry, Row
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.cpu import sdpa
from sgl_ext.engine.cpu.attention import CpuAttnBackend

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

GEOMETRIES = geometries(groups=4, head_dims=[16, 64], windows=st.integers(1, 80))
spans = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), min_size=1, max_size=4)


def assert_equal(trial: AttentionTrial, rows: list[Row]) -> None:
    tolerance = TOLERANCE[trial.geometry.dtype]
    query = trial.query(rows)
    torch.testing.assert_close(
        trial.extend(trial.ours, query, rows), trial.extend(trial.stock, query, rows),
        atol=tolerance, rtol=tolerance,
    )  # fmt: skip


@given(GEOMETRIES, spans, st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_extend_matches_stock_attention(
    geometry: Geometry, lengths: list[tuple[int, int]], seed: int
) -> None:
    trial = AttentionTrial(geometry, [prefix + new for prefix, new in lengths], seed=seed)
    assert_equal(trial, [Row(request, *span) for request, span in enumerate(lengths)])


@given(GEOMETRIES, st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_decode_matches_stock_attention(geometry: Geometry, contexts: list[int], seed: int) -> None:
    trial = AttentionTrial(geometry, contexts, seed=seed)
    rows = [Row(request, context - 1, 1) for request, context in enumerate(contexts)]
    query = trial.query(rows)
    tolerance = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(
        trial.decode(trial.ours, query, rows), trial.decode(trial.stock, query, rows),
        atol=tolerance, rtol=tolerance,
    )  # fmt: skip


@given(GEOMETRIES, st.lists(st.integers(1, 60), min_size=2, max_size=5), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_rows_of_one_request_attend_as_a_single_row(
    geometry: Geometry, cuts: list[int], seed: int
) -> None:
    """Splits a sequence into rows of one request and compares them with a single row."""
    trial = AttentionTrial(geometry, [sum(cuts)], seed=seed)
    starts = [sum(cuts[:index]) for index in range(len(cuts))]
    whole = [Row(0, 0, sum(cuts))]
    query = trial.query(whole)
    rows = [Row(0, start, new) for start, new in zip(starts, cuts, strict=True)]
    tolerance = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(
        trial.extend(trial.ours, query, rows), trial.extend(trial.ours, query, whole),
        atol=tolerance, rtol=tolerance,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize("span", [(600, 1100), (1, sdpa.BLOCK), (0, sdpa.BLOCK + 1), (3000, 16)])
def test_extend_of_long_spans_matches_stock_attention(
    span: tuple[int, int], window: int | None
) -> None:
    geometry = Geometry(window=window, dtype=torch.float32)
    assert_equal(AttentionTrial(geometry, [sum(span)]), [Row(0, *span)])


@given(st.integers(1, sdpa.BLOCK), st.integers(0, 2000), st.none() | st.integers(0, 900))
@settings(max_examples=60, deadline=None)
def test_causal_band_masks_future_and_out_of_window_keys(
    rows: int, prefix: int, window: int | None
) -> None:
    band = sdpa.CausalBand()
    band.mask(1, 64, torch.float32, window)  # a narrow band, which the next call grows
    mask = band.mask(rows, prefix + rows, torch.float32, window)
    position = torch.arange(prefix, prefix + rows).unsqueeze(1)
    key = torch.arange(prefix + rows)
    seen = key <= position
    if window is not None:
        seen &= key >= position - window
    assert torch.equal(mask == 0, seen)
    assert torch.equal(mask.isneginf(), ~seen)


def test_attention_work_is_new_tokens_times_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the work passed to torch's kernel, because times would depend on the machine."""
    work = []
    real = sdpa.scaled_dot_product_attention

    def counting(query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object) -> object:
        work.append(query.shape[-2] * query.shape[-3] * query.shape[-4] * key.shape[-2])
        return real(query, key, *args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", counting)
    geometry = Geometry(dtype=torch.float32)
    trial = AttentionTrial(geometry, [4112])
    rows = [Row(0, 4096, 16)]
    trial.extend(trial.gathering, trial.query(rows), rows)
    assert sum(work) == 16 * geometry.heads * 4112
    work.clear()
    windowed = AttentionTrial(Geometry(dtype=torch.float32, window=64), [4112])
    windowed.extend(windowed.gathering, windowed.query(rows), rows)
    assert sum(work) == 16 * geometry.heads * (16 + 64)


def test_separate_sliding_window_pool_matches_stock_attention() -> None:
    """Checks a layer with a window in a smaller pool, where every token has another slot."""
    geometry = Geometry(window=20, dtype=torch.float32)
    plain = AttentionTrial(geometry, [90])
    tokens = plain.ours.token_to_kv_pool.size
    pool = SWAKVPool(
        size=tokens, size_swa=64, page_size=1, dtype=geometry.dtype, head_num=geometry.kv_heads,
        head_dim=geometry.head_dim, swa_attention_layer_ids=[0], full_attention_layer_ids=[1],
        device="cpu", enable_alt_stream=False,
    )  # fmt: skip
    table = plain.ours.req_to_token_pool.req_to_token
    live = table[0, -60:].long()  # older tokens have left the window and lost their slots
    homes = torch.randperm(64)[:60] + 1
    mapping = torch.zeros(tokens + 2, dtype=torch.int64)
    mapping[live] = homes
    pool.full_to_swa_index_mapping = mapping
    for get in ("get_key_buffer", "get_value_buffer"):
        getattr(pool, get)(0)[homes] = getattr(plain.ours.token_to_kv_pool, get)(0)[live]
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=plain.ours.req_to_token_pool, token_to_kv_pool=pool,
        model=torch.nn.Module(), model_config=SimpleNamespace(),
    )  # fmt: skip
    ours = CpuAttnBackend(runner)
    for rows, forward in (([Row(0, 60, 30)], plain.extend), ([Row(0, 89, 1)], plain.decode)):
        query = plain.query(rows)
        torch.testing.assert_close(
            forward(ours, query, rows), forward(plain.stock, query, rows), atol=2e-6, rtol=2e-6
        )


@pytest.mark.parametrize(
    ("field", "value", "config", "reason"),
    [
        ("logit_cap", 30.0, {}, "attention logits capped at 30"),
        ("xai_temperature_len", 1024, {}, "an attention temperature"),
        ("attn_type", AttentionType.DECODER_BIDIRECTIONAL, {}, "attention to later tokens"),
        ("attn_type", AttentionType.ENCODER_ONLY, {}, "later tokens within a window"),
        ("use_irope", True, {"attention_chunk_size": 8192}, "within chunks of the prompt"),
        ("layer_id", 0, {"has_attention_sinks": True}, "attention sinks"),
    ],
)
def test_attention_that_is_not_computed_is_refused_at_start(
    field: str, value: object, config: dict[str, object], reason: str
) -> None:
    trial = AttentionTrial(Geometry(window=16), [8])
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=None, token_to_kv_pool=None,
        model=torch.nn.ModuleList(trial.layers), model_config=SimpleNamespace(),
    )  # fmt: skip
    CpuAttnBackend(runner)
    setattr(trial.layers[0], field, value)
    runner.model_config = SimpleNamespace(**config)
    with pytest.raises(ActivationError, match=f"CPU attention does not support .*{reason}"):
        CpuAttnBackend(runner)


def test_a_batch_without_extend_lengths_is_refused() -> None:
    trial = AttentionTrial(Geometry(), [8])
    batch = trial._batch(ForwardMode.TARGET_VERIFY, [Row(0, 4, 4)])
    batch.extend_seq_lens = None
    with pytest.raises(NotImplementedError, match="does not support TARGET_VERIFY batches"):
        trial.ours.init_forward_metadata(batch)


def test_the_registry_entry_torch_native_is_our_backend() -> None:
    from sglang.srt.layers.attention import attention_registry

    from sgl_ext.engine.cpu import attention

    attention.install()
    assert attention_registry.ATTENTION_BACKENDS["torch_native"] is attention.CpuAttnBackend
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=None, token_to_kv_pool=None, model=torch.nn.Module(),
        model_config=SimpleNamespace(),
    )  # fmt: skip
    assert not attention.CpuAttnBackend(runner).support_triton()
