"""Tests of the compiled attention: exactness, error against fp64, fallbacks and refusals."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attention_kit import geometries
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext._native import _attention
from sgl_ext.bench.harness.attention_trial import AttentionTrial, Geometry, Row
from sgl_ext.engine.cpu import native_attention
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.errors import ExtError

ISAS = _attention.isas()
HEAD_DIMS = [16, 32, 48, 64, 80, 96, 128, 256]
# Smaller errors are rounding in the last digits, where either path may be nearer by chance.
NOISE = {torch.float32: 1e-6, torch.bfloat16: 1e-3}

GEOMETRIES = geometries(groups=9, head_dims=HEAD_DIMS, windows=st.integers(0, 80))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[Row]]:
    """Draws context lengths of some requests, and rows at any position of any of them."""
    contexts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        request = draw(st.integers(0, len(contexts) - 1))
        end = draw(st.integers(1, contexts[request]))
        new = draw(st.just(1) | st.integers(1, end))
        rows.append(Row(request, end - new, new))
    return contexts, rows


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def poison_other_slots(trial: AttentionTrial) -> None:
    """Fills the slots that no request has with NaN, because no row may read them."""
    table = trial.ours.req_to_token_pool.req_to_token
    pool = trial.ours.token_to_kv_pool
    named = torch.zeros(pool.k_buffer[0].shape[0], dtype=torch.bool)
    named[table[table > 0].long()] = True
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[~named] = math.nan


def reference(trial: AttentionTrial, query: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """Returns the attention in fp64, ``[tokens, heads * head_dim]``."""
    geometry = trial.geometry
    pool, table = trial.ours.token_to_kv_pool, trial.ours.req_to_token_pool.req_to_token
    group = geometry.heads // geometry.kv_heads
    outputs, start = [], 0
    for request, prefix, new in rows:
        slots = table[request, : prefix + new].long()
        keys, values = (
            buffer[slots].double().repeat_interleave(group, 1)
            for buffer in (pool.get_key_buffer(0), pool.get_value_buffer(0))
        )
        q = query[start : start + new].view(new, geometry.heads, -1).double()
        logits = torch.einsum("qhd,khd->hqk", q, keys) * geometry.head_dim**-0.5
        position = torch.arange(prefix, prefix + new).unsqueeze(1)
        key = torch.arange(prefix + new)
        hidden = key > position
        if geometry.window is not None:
            hidden |= key < position - geometry.window
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).reshape(new, -1))
        start += new
    return torch.cat(outputs)


def assert_as_good_as_torch(
    trial: AttentionTrial, query: torch.Tensor, rows: list[Row], noise: float
) -> None:
    truth = reference(trial, query, rows)
    ours, theirs = (
        (trial.extend(backend, query, rows).double() - truth).abs().max().item()
        for backend in (trial.ours, trial.gathering)
    )
    assert ours <= 1.5 * theirs + noise, f"error {ours} where torch's is {theirs}"


@pytest.mark.parametrize("isa", ISAS)
@given(GEOMETRIES, batches(), st.sampled_from(["layer-major", "block-major"]), st.integers(0, 999))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_error_against_fp64_is_as_small_as_torchs(
    isa: str, geometry: Geometry, batch: tuple[list[int], list[Row]], layout: str, seed: int
) -> None:
    contexts, rows = batch
    trial = AttentionTrial(geometry, contexts, layers=2, layout=layout, kernels=isa, seed=seed)
    poison_other_slots(trial)
    assert_as_good_as_torch(trial, trial.query(rows), rows, NOISE[geometry.dtype])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "rows"),
    [
        (None, [Row(0, 2899, 1), Row(0, 700, 1)]),  # results of ranges of keys are merged
        (None, [Row(0, 2884, 16)]),
        (None, [Row(0, 0, 700)]),  # several blocks of queries
        (1000, [Row(0, 2000, 300), Row(0, 2899, 1)]),
    ],
)
def test_error_of_long_rows_is_as_small_as_torchs(
    isa: str, dtype: torch.dtype, window: int | None, rows: list[Row]
) -> None:
    trial = AttentionTrial(Geometry(6, 2, 64, window, dtype), [2900], kernels=isa)
    poison_other_slots(trial)
    assert_as_good_as_torch(trial, trial.query(rows), rows, NOISE[dtype])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_layouts_give_bitwise_equal_outputs(isa: str, dtype: torch.dtype) -> None:
    for rows in ([Row(0, 1499, 1), Row(1, 30, 1)], [Row(0, 1450, 50), Row(1, 0, 31)]):
        outputs = []
        for layout in ("layer-major", "block-major"):
            trial = AttentionTrial(
                Geometry(dtype=dtype), [1500, 31], layers=3, layout=layout, kernels=isa
            )
            attend = trial.prepared(trial.ours, rows)
            outputs.append(attend(trial.query(rows), 1))
        assert torch.equal(*outputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 333])
def test_a_row_is_independent_of_other_rows_and_thread_count(isa: str, window: int | None) -> None:
    trial = AttentionTrial(Geometry(window=window), [1500, 700], kernels=isa)
    rows = [
        Row(0, 1499, 1), Row(0, 1400, 90), Row(1, 0, 300), Row(0, 899, 1), Row(1, 690, 10),
        Row(1, 0, 1),
    ]  # fmt: skip
    query = trial.query(rows)
    torch.set_num_threads(1)
    alone, start = [], 0
    for row in rows:
        alone.append(trial.extend(trial.ours, query[start : start + row.new], [row]))
        start += row.new
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(trial.extend(trial.ours, query, rows), torch.cat(alone))


def test_a_query_may_be_a_slice_of_a_wider_tensor() -> None:
    trial = AttentionTrial(Geometry(), [100])
    rows = [Row(0, 90, 10)]
    query = trial.query(rows)
    wide = torch.cat([query, query * 2], 1)
    assert torch.equal(
        trial.extend(trial.ours, wide[:, : query.shape[1]], rows),
        trial.extend(trial.ours, query, rows),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[Row(0, 299, 1)], [Row(0, 250, 50)]])
def test_large_logits_do_not_overflow(isa: str, dtype: torch.dtype, rows: list[Row]) -> None:
    # The scale is not a power of two, so products with it are rounded. All keys are equal.
    trial = AttentionTrial(Geometry(head_dim=48, dtype=dtype), [300], kernels=isa)
    query = trial.query(rows) * 1e15
    trial.ours.token_to_kv_pool.k_buffer[0][:] = 1e15
    out = trial.extend(trial.ours, query, rows)
    torch.testing.assert_close(out, reference(trial, query, rows).to(dtype), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [[Row(0, 699, 1)], [Row(0, 650, 50)]])
def test_logits_of_minus_infinity_have_no_weight(isa: str, rows: list[Row]) -> None:
    geometry = Geometry(2, 1, 16, None, torch.float32)
    trial = AttentionTrial(geometry, [700], kernels=isa)
    pool, table = trial.ours.token_to_kv_pool, trial.ours.req_to_token_pool.req_to_token
    query = trial.query(rows).abs()
    pool.k_buffer[0][table[0, :600].long()] = -math.inf
    out = trial.extend(trial.ours, query, rows)
    torch.testing.assert_close(out, reference(trial, query, rows).float(), atol=1e-5, rtol=1e-5)


def test_layers_with_and_without_a_window_share_a_forward() -> None:
    trial = AttentionTrial(Geometry(), [600], layers=2)
    rows = [Row(0, 500, 100)]
    trial.layers[1].sliding_window_size = 40
    query = trial.query(rows)
    ours, gathering = (trial.prepared(backend, rows) for backend in (trial.ours, trial.gathering))
    for layer in (0, 1, 0):
        torch.testing.assert_close(
            ours(query, layer), gathering(query, layer), atol=2e-2, rtol=2e-2
        )


def uses_native(trial: AttentionTrial, monkeypatch: pytest.MonkeyPatch) -> bool:
    calls = []
    real = NativeAttention.attend

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(NativeAttention, "attend", counted)
    rows = [Row(0, 4, 4)]
    query = trial.query(rows)
    torch.testing.assert_close(
        trial.extend(trial.ours, query, rows), trial.extend(trial.stock, query, rows),
        atol=2e-2, rtol=2e-2,
    )  # fmt: skip
    return bool(calls)


@pytest.mark.parametrize(
    ("geometry", "native"),
    [
        (Geometry(), True),
        (Geometry(dtype=torch.float32), True),
        (Geometry(dtype=torch.float16), False),
        (Geometry(4, 2, 24), False),
    ],
)
def test_unsupported_geometries_fall_back_to_torch(
    geometry: Geometry, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uses_native(AttentionTrial(geometry, [8]), monkeypatch) is native


def test_unsupported_tensors_and_scales_are_not_served() -> None:
    query, keys = torch.zeros(1, 4, 32), torch.zeros(9, 2, 32)
    assert NativeAttention.serves(query, keys, keys.clone(), 1.0)
    assert not NativeAttention.serves(query, keys, torch.zeros(9, 2, 16), 1.0)
    assert not NativeAttention.serves(query, keys.bfloat16(), keys.bfloat16(), 1.0)
    assert not NativeAttention.serves(query, keys.transpose(0, 1), keys.transpose(0, 1), 1.0)
    assert not NativeAttention.serves(query, keys, keys, -1.0)


def test_the_environment_selects_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_attention.ATTENTION, "torch")
    assert not uses_native(AttentionTrial(Geometry(), [8]), monkeypatch)
    monkeypatch.setenv(native_attention.ATTENTION, "portable")
    assert uses_native(AttentionTrial(Geometry(), [8]), monkeypatch)
    monkeypatch.setenv(native_attention.ATTENTION, "sse9")
    with pytest.raises(ExtError, match=r"SGLEXT_ATTENTION=sse9 .* native, torch or one of"):
        AttentionTrial(Geometry(), [8])


def test_without_the_compiled_module_torch_serves_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sgl_ext._native

    monkeypatch.setitem(sys.modules, "sgl_ext._native._attention", None)
    monkeypatch.delattr(sgl_ext._native, "_attention")
    native_attention._imported.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            trial = AttentionTrial(Geometry(), [8])
            AttentionTrial(Geometry(), [8])
        assert not uses_native(trial, monkeypatch)
    finally:
        native_attention._imported.cache_clear()
    (warning,) = caplog.messages
    assert "torch's attention is used instead" in warning


def test_every_isa_can_be_selected_and_torchs_openmp_is_used() -> None:
    assert ISAS[-1] == "portable"
    for isa in ISAS:
        assert _attention.Attention("bfloat16", 4, 2, 64, 0.125, None, isa).isa == isa
    assert _attention.Attention("bfloat16", 4, 2, 64, 0.125).isa == ISAS[0]
    library = Path(_attention.openmp_library())
    assert library.parent == Path(torch.__file__).parent / "lib"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float16", 4, 2, 64, 1.0), "dtype 'float16'"),
        (("float32", 4, 3, 64, 1.0), "4 heads are not a multiple of 3"),
        (("float32", 4, 2, 24, 1.0), "head_dim 24"),
        (("float32", 4, 2, 64, 0.0), "scale 0.*; expected a finite number above 0"),
        (("float32", 4, 2, 64, math.nan), "scale .*nan"),
        (("float32", 4, 2, 64, 1.0, -1), "window -1"),
        (("float32", 4, 2, 64, 1.0, None, "sse9"), "'sse9' is not supported on this machine"),
    ],
)
def test_invalid_operator_arguments_are_refused(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _attention.Attention(*arguments)


TABLE = torch.arange(1, 21, dtype=torch.int32).view(2, 10)


@pytest.mark.parametrize(
    ("requests", "contexts", "queries", "message"),
    [
        ([2], [5], [1], "row 0 of the batch references request 2 of a table of 2"),
        ([-1], [5], [1], "references request -1"),
        ([0, 1], [5, 11], [1, 1], "row 1 of the batch has a context of 11 tokens; .* holds 10"),
        ([0], [5], [6], "has 6 queries in a context of 5"),
        ([0], [5], [-1], "has -1 queries"),
        ([0], [5, 5], [1], "1 requests, 2 contexts and 1 query counts"),
    ],
)
def test_invalid_rows_are_refused(
    requests: list[int], contexts: list[int], queries: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of(TABLE, requests, contexts, queries)


def test_slots_and_queries_out_of_range_are_refused() -> None:
    attention = NativeAttention()
    batch = batch_of(TABLE, [1, 0], [10, 4], [2, 1])
    assert (batch.tokens, batch.last_slot) == (3, 20)
    keys = torch.zeros(20, 1, 16)
    query = torch.zeros(3, 1, 16)
    with pytest.raises(ValueError, match="has slot 20; the pool has 20"):
        attention.attend(batch, query, keys, keys, scale=1.0)
    with pytest.raises(ValueError, match="has 3 queries; 2 were given"):
        attention.attend(
            batch, query[:2], torch.zeros(21, 1, 16), torch.zeros(21, 1, 16), scale=1.0
        )
    with pytest.raises(ValueError, match="row 0 of the batch has slot -5"):
        batch_of(TABLE - 6, [0], [10], [1])
    with pytest.raises(ValueError, match="expected contiguous rows of int32"):
        batch_of(TABLE.long(), [0], [10], [1])


def test_threads_share_a_batch() -> None:
    """Each thread meets layer shapes whose plan another one makes or uses at the same moment."""
    torch.set_num_threads(1)
    attention, count, rounds = NativeAttention(), 4, 40
    table = torch.randperm(400, dtype=torch.int32).view(4, 100)
    keys, values = torch.randn(2, 400, 1, 16)
    query = torch.randn(140, 2, 16)
    windows = range(64)

    def batch() -> _attention.Batch:
        return batch_of(table, [0, 1, 2, 3], [100] * 4, [1, 99, 1, 39])

    def attend(shared: _attention.Batch, window: int) -> torch.Tensor:
        return attention.attend(shared, query, keys, values, scale=0.25, window=window)

    expected = [attend(batch(), window) for window in windows]
    batches = [batch() for _ in range(rounds)]
    barrier = threading.Barrier(count, timeout=60)

    def forwards(_thread: int) -> list[int]:
        wrong = []
        for shared in batches:
            barrier.wait()
            wrong += [w for w in windows if not torch.equal(attend(shared, w), expected[w])]
        return wrong

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(forwards, range(count))) == [[]] * count


def test_an_empty_batch_gives_an_empty_output() -> None:
    batch = batch_of(TABLE, [], [], [])
    keys = torch.zeros(20, 1, 16)
    out = NativeAttention().attend(batch, torch.zeros(0, 1, 16), keys, keys, scale=1.0)
    assert out.shape == (0, 1, 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [([900, 3], [1, 1]), ([900, 40], [300, 7]), ([64], [64])])
def test_slots_outside_the_pool_give_bitwise_equal_outputs(
    isa: str, dtype: torch.dtype, shape: tuple[list[int], list[int]]
) -> None:
    contexts, queries = shape
    slots, kv_heads, head_dim = 1200, 2, 64
    pool = torch.randn(slots, 2, kv_heads, head_dim).to(dtype)
    table = torch.stack([torch.randperm(slots)[:900] for _ in contexts]).to(torch.int32)
    rows = batch_of(table, list(range(len(contexts))), contexts, queries)
    query = torch.randn(sum(queries), 6, head_dim).to(dtype)
    attention = NativeAttention(isa)
    expected = attention.attend(rows, query, pool[:, 0], pool[:, 1], scale=0.125)
    for boundary in (0, 1, 700, 1199):
        near = pool.clone()
        near[boundary:] = math.nan
        wide = torch.full((slots - boundary, 3, 2, kv_heads, head_dim), math.nan, dtype=dtype)
        wide[:, 1] = pool[boundary:]
        for elsewhere in (wide[:, 1], wide[:, 1].contiguous()):
            found = attention.attend(
                rows, query, near[:, 0], near[:, 1], scale=0.125, elsewhere=elsewhere
            )
            assert torch.equal(found, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("contexts", "queries"),
    [([1], [1]), ([900, 3], [1, 1]), ([900, 40], [300, 7])],  # several ranges of keys are merged
)
def test_log_sum_exps_are_those_of_torch(
    isa: str, dtype: torch.dtype, contexts: list[int], queries: list[int]
) -> None:
    heads, kv_heads, head_dim, scale = 6, 2, 64, 0.125
    keys, values = torch.randn(2, 1000, kv_heads, head_dim).to(dtype)
    table = torch.stack([torch.randperm(1000)[:900] for _ in contexts]).to(torch.int32)
    rows = batch_of(table, range(len(contexts)), contexts, queries)
    query = (3 * torch.randn(sum(queries), heads, head_dim)).to(dtype)
    attention, sums = NativeAttention(isa), torch.full((sum(queries), heads), math.nan)
    out = attention.attend(rows, query, keys, values, scale=scale, sums=sums)
    assert torch.equal(out, attention.attend(rows, query, keys, values, scale=scale))
    expected, start = [], 0
    for line, context, new in zip(table.long(), contexts, queries, strict=True):
        seen = keys[line[:context]].double().repeat_interleave(heads // kv_heads, 1)
        asked = query[start : (start := start + new)].double()
        logits = torch.einsum("qhd,khd->qhk", asked, seen) * scale
        hidden = torch.arange(context) > torch.arange(context - new, context)[:, None]
        expected.append(logits.masked_fill(hidden[:, None], -math.inf).logsumexp(-1))
    error = 1e-5 if dtype == torch.float32 else 3e-3  # weights may be rounded to bfloat16
    torch.testing.assert_close(sums.double(), torch.cat(expected), atol=error, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("context", "new"), [(300, 1), (300, 40), (700, 1)])
def test_the_log_sum_exp_of_logits_of_minus_infinity_is_minus_infinity(
    isa: str, context: int, new: int
) -> None:
    table = torch.arange(context, dtype=torch.int32)[None]
    keys, sums = torch.full((context, 1, 16), -math.inf), torch.zeros(new, 2)
    rows, query = batch_of(table, [0], [context], [new]), torch.ones(new, 2, 16)
    out = NativeAttention(isa).attend(rows, query, keys, torch.ones_like(keys), scale=1, sums=sums)
    assert (sums == -math.inf).all()
    assert (out == 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_torch_on_the_same_thread_is_not_disturbed(isa: str) -> None:
    """Interleaves with torch's products, which may keep their own tile configuration (AMX)."""
    torch.set_num_threads(1)
    trial = AttentionTrial(Geometry(dtype=torch.bfloat16), [300], kernels=isa)
    rows = [Row(0, 0, 300)]
    query = trial.query(rows)
    heads = torch.randn(1, 3, 600, 64, dtype=torch.bfloat16)
    matrix = torch.randn(200, 200, dtype=torch.bfloat16)

    def theirs() -> list[torch.Tensor]:
        attention = torch.nn.functional.scaled_dot_product_attention
        return [attention(heads, heads, heads, is_causal=True), matrix @ matrix]

    alone = theirs()
    ours = trial.extend(trial.ours, query, rows)
    for _ in range(3):
        assert all(map(torch.equal, theirs(), alone))
        assert torch.equal(trial.extend(trial.ours, query, rows), ours)
