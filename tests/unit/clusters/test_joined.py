"""Tests of attention over several stored contexts, which equals attention over one pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rope_kit import tables
from test_cluster_attention import Setup, own_tokens, seen_by
from test_stored import GEOMETRY, TOKENS

from sgl_ext.clusters.reader import DeviceError
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.joined import JoinedContexts, turned, verified_rope
from sgl_ext.engine.clusters.own import Own, OwnTokensError
from sgl_ext.engine.cpu.native_attention import batch_of
from sgl_ext.errors import ExtError
from sgl_ext.memory.rope import Rope
from sgl_ext.memory.transfer import TransferEngine

PAIRS = GEOMETRY.head_dim // 2
ROPE = Rope(GEOMETRY.head_dim, tuple(10_000 ** (-at / PAIRS) for at in range(PAIRS)))


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as found:
        yield found


def joined(setup: Setup, *more: Any) -> JoinedContexts:
    contexts = [setup.attention, setup.attention, *more]
    return JoinedContexts(contexts, ROPE, GEOMETRY.scale)


def expected(setup: Setup, layer: int, query: torch.Tensor, own: Own) -> torch.Tensor:
    """Returns the attention over one pool: twice the context, the second time moved behind it.

    The second time without its first token, the slot of which no row sees.
    """
    keys, values = setup.whole[layer, :TOKENS].unbind(1)
    mine = setup.pool[layer].unbind(1)
    keys = torch.cat([keys, turned(keys, TOKENS, ROPE), mine[0]])
    values = torch.cat([values, values, mine[1]])
    both = np.delete(np.arange(2 * TOKENS), TOKENS)
    table = np.zeros((len(query), len(both) + int(own.lengths.max(initial=0))), np.int32)
    table[:, : len(both)] = both
    for row, slots in enumerate(seen_by(own)):
        table[row, len(both) : len(both) + len(slots)] = 2 * TOKENS + slots
    lengths = (own.lengths + len(both)).tolist()
    batch = batch_of(torch.from_numpy(table), range(len(query)), lengths, [1] * len(query))
    return setup.native.attend(batch, query, keys, values, scale=GEOMETRY.scale)


def test_all_tokens_of_two_contexts_are_attended_to_as_one_text(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)
    for layer in range(3):
        both, own, query = joined(setup), own_tokens(5, setup.chance), setup.query(5) * 3
        keys, values = setup.pool[layer].unbind(1)
        assert both.tokens == 2 * TOKENS
        for _ in range(2):  # the second time over the same lines of own tokens
            found = both.attend(setup.native, layer, query, keys, values, own, 1.0)
            torch.testing.assert_close(found, expected(setup, layer, query, own))


def test_own_tokens_on_a_device_are_left_to_the_caller(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)
    query, nothing = setup.query(4), torch.empty(0, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    own = Own.elsewhere(4)._replace(sums=np.zeros((4, GEOMETRY.heads), np.float32))
    sums = torch.empty(4, GEOMETRY.heads)
    found = joined(setup).attend(setup.native, 1, query, nothing, nothing, own, 1.0, sums)
    torch.testing.assert_close(found, expected(setup, 1, query, own))
    keys = setup.whole[1, :TOKENS, 0]
    logits = [
        torch.einsum("rgqd,tgd->rgqt", query.unflatten(1, (GEOMETRY.kv_heads, -1)), each)
        for each in (keys, turned(keys, TOKENS, ROPE)[1:])
    ]
    right = (GEOMETRY.scale * torch.cat(logits, -1)).logsumexp(-1).flatten(1)
    torch.testing.assert_close(sums, right)


def test_a_share_selects_blocks_of_each_context(engine: TransferEngine, tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine)
    both, own, query = joined(setup), own_tokens(4, setup.chance), setup.query(4) * 3
    keys, values = setup.pool[0].unbind(1)
    both.prefetch(0, query, keys, own, 0.25, 2.0)
    close = both.attend(setup.native, 0, query, keys, values, own, 0.5)
    far = both.attend(setup.native, 0, query, keys, values, own, 0.02)
    right = expected(setup, 0, query, own)
    assert 0 < (close - right).abs().mean() < 0.5 * (far - right).abs().mean()


@pytest.mark.parametrize("error", [DeviceError("it is gone"), IndexError("it is broken")])
def test_a_failure_concerns_one_of_the_contexts(
    error: Exception, engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)

    class Broken(StoredAttention):
        def attend(self, *args: Any) -> torch.Tensor:
            raise error

    broken = Broken(setup.stored, setup.memory)
    both, own, query = joined(setup, broken), own_tokens(2, setup.chance), setup.query(2)
    keys, values = setup.pool[0].unbind(1)
    with pytest.raises(type(error)):
        both.attend(setup.native, 0, query, keys, values, own, 1.0)
    both.failed = "it failed"
    assert (both.failed, broken.failed, setup.attention.failed) == ("it failed", "it failed", "")
    values = values.clone()
    values[:] = torch.nan
    with pytest.raises(OwnTokensError, match="own tokens is not finite"):
        both.attend(setup.native, 0, query, keys, values, own, 1.0)


@pytest.mark.parametrize("name", ["plain", "half", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_queries_are_verified_against_the_model(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = type("LlamaForCausalLM", (torch.nn.Module,), {})()
    model.embedding = tables()[name].to(dtype)
    found = verified_rope(model)
    assert isinstance(found, Rope)
    wrong = Rope(found.rotary_dim, found.frequencies[::-1], found.interleaved)
    monkeypatch.setattr("sgl_ext.engine.clusters.joined.rope_of", lambda _: wrong)
    assert "queries rotated from position" in str(verified_rope(model))
    other = verified_rope(torch.nn.Linear(2, 2))
    assert isinstance(other, ExtError)
    assert "not Linear" in str(other)


def test_adjacent_pairs_are_rotated() -> None:
    rope = Rope(4, (0.5, 0.25), interleaved=True)
    found = turned(torch.tensor([[[1.0, 0.0, 0.0, 1.0, 7.0]]]), 2, rope)
    right = [np.cos(1.0), np.sin(1.0), -np.sin(0.5), np.cos(0.5), 7.0]
    torch.testing.assert_close(found.flatten(), torch.tensor(right, dtype=torch.float32))
