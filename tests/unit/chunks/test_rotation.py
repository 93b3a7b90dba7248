"""Tests of moved KV, which equals KV computed at the target position up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rope_kit import tables
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding

from sgl_ext.chunks.rotation import RotatingCopy
from sgl_ext.engine.chunks.rope import verified_rope
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.memory.rope import Rope, frequencies_of
from sgl_ext.memory.slab import Layout

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def rope(rotary_dim: int, *, interleaved: bool = False, base: float = 10_000.0) -> Rope:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return Rope(rotary_dim, tuple((1.0 / base**exponents).tolist()), interleaved)


def moved(layout: Layout, how: Rope, kv: torch.Tensor, delta: int) -> torch.Tensor:
    """Returns ``kv [tokens, layers, 2, heads, head_dim]`` moved by ``delta`` positions.

    It is copied token by token into a wider array.
    """
    out = torch.zeros(len(kv), 2, *kv.shape[1:], dtype=kv.dtype)
    table = [
        (kv[i].data_ptr(), out[i].data_ptr(), 1, layout.token_bytes, 2 * layout.token_bytes)
        for i in range(len(kv))
    ]
    if len(kv) > 2:  # the first two tokens are copied in one run
        table[:2] = [(*table[0][:2], 2, *table[0][3:])]
    RotatingCopy(layout, how)(np.array(table, np.int64), delta)
    assert not out[:, 1].any()
    return out[:, 0]


@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    part=st.sampled_from([1.0, 0.5, 0.25]),
    interleaved=st.booleans(),
    tokens=st.integers(1, 40),
    at=st.integers(0, 1000),
    delta=st.integers(-1000, 7000),
    seed=st.integers(0, 1000),
)
def test_moved_keys_equal_keys_computed_at_the_target_position(
    dtype: str, layers: int, heads: int, head_dim: int, part: float, interleaved: bool,
    tokens: int, at: int, delta: int, seed: int,
) -> None:  # fmt: skip
    delta = max(delta, -at)
    rotary_dim = int(head_dim * part)
    layout = Layout(1, layers, heads, head_dim, dtype, "f")
    shape = (tokens, layers, 2, heads, head_dim)
    bare = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    how = rope(rotary_dim, interleaved=interleaved)
    theirs = RotaryEmbedding(head_dim, rotary_dim, 10_000, 10_000, not interleaved, torch.float32)

    def placed(position: int) -> torch.Tensor:
        """Returns the KV as SGLang computes it from ``position`` on, in fp32."""
        kv = bare.clone()
        positions = torch.arange(position, position + tokens)
        for layer in range(layers):
            keys = kv[:, layer, 0].reshape(tokens, -1).clone()
            _, keys = theirs.forward_native(positions, keys.clone(), keys)
            kv[:, layer, 0] = keys.view(tokens, heads, head_dim)
        return kv

    before, after = placed(at).to(TORCH[dtype]), placed(at + delta)
    found = moved(layout, how, before, delta)
    assert torch.equal(found[:, :, 1], before[:, :, 1])
    assert torch.equal(found[..., rotary_dim:], before[..., rotary_dim:])
    tolerance = 2e-3 if dtype == "float32" else 3e-2  # SGLang's table of cosines is in fp32
    torch.testing.assert_close(found.float(), after, rtol=tolerance, atol=tolerance)
    if delta == 0:
        assert torch.equal(found, before)


def test_long_runs_split_over_threads_equal_short_runs() -> None:
    layout = Layout(1, 30, 3, 64, "bfloat16", "f")
    kv = torch.randn(500, 30, 2, 3, 64).to(torch.bfloat16)
    out = torch.empty_like(kv)
    table = [[kv.data_ptr(), out.data_ptr(), 500, layout.token_bytes, layout.token_bytes]]
    RotatingCopy(layout, rope(64))(np.array(table), 17)
    assert torch.equal(out[123:130], moved(layout, rope(64), kv[123:130], 17))


def test_unsupported_layouts_and_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        RotatingCopy(Layout(1, 1, 1, 64, "float16", "f"), rope(64))
    with pytest.raises(ValueError, match="rotary_dim 128"):
        RotatingCopy(Layout(1, 1, 1, 64, "float32", "f"), rope(128))
    copy = RotatingCopy(Layout(1, 1, 1, 64, "float32", "f"), rope(64))
    with pytest.raises(ValueError, match="run 0: 2 tokens of 512 bytes, pitches 512 and 64"):
        copy(np.array([[0, 0, 2, 512, 64]]), 1)


@pytest.mark.parametrize("name", ["plain", "half", "linear", "llama3", "yarn"])
def test_frequencies_are_recovered_from_the_cos_sin_table(name: str) -> None:
    embedding = tables()[name]
    table = embedding._compute_cos_sin_cache().numpy()
    found = frequencies_of(table)
    assert len(found) == embedding.rotary_dim // 2
    if name in ("plain", "half"):
        expected = embedding._compute_inv_freq(embedding.base).numpy()
        np.testing.assert_allclose(found, expected, rtol=3e-7)


@pytest.mark.parametrize("scaling", [None, 3.0])
def test_tables_of_a_million_positions_may_be_rounded(scaling: float | None) -> None:
    """Above 2^19, adjacent float32 angles are 0.06 apart."""
    if scaling is None:
        embedding = RotaryEmbedding(8, 8, 1 << 20, 10, True, torch.float32)
    else:
        embedding = LinearScalingRotaryEmbedding(8, 8, 1 << 19, 10, True, scaling, torch.float32)
    table = embedding._compute_cos_sin_cache()
    expected = embedding._compute_inv_freq(embedding.base).numpy() / (scaling or 1.0)
    np.testing.assert_allclose(frequencies_of(table.numpy()), expected, rtol=3e-7)
    longer = torch.cat((table, table[1:]))
    with pytest.raises(ValueError, match=r"at positions \d+ to .* is static"):
        frequencies_of(longer.numpy())


def test_embeddings_that_are_not_static_are_refused() -> None:
    table = RotaryEmbedding(64, 64, 4096, 10_000, True, torch.float32)._compute_cos_sin_cache()
    longer = torch.cat((table[:2048], table[:2048].flip(1)))
    with pytest.raises(ValueError, match="only if the embedding is static"):
        frequencies_of(longer.numpy())


@pytest.mark.parametrize("name", ["plain", "half", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moved_keys_are_verified_against_the_model(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = tables()[name]
    layout = Layout(16, 2, 3, embedding.head_size, dtype, "f")
    model = type("LlamaForCausalLM", (torch.nn.Module,), {})()
    model.embedding = embedding
    verified_rope(model, layout)
    right = frequencies_of(embedding._compute_cos_sin_cache().numpy())
    wrong = Rope(embedding.rotary_dim, right[::-1], not embedding.is_neox_style)
    monkeypatch.setattr("sgl_ext.engine.kv.rope.rope_of", lambda _: wrong)
    with pytest.raises(ActivationError, match="keys moved from position 0 to 1 differ by"):
        verified_rope(model, layout)
