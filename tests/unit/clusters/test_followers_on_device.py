"""Followers whose own tokens are on a device: merged attention equals the CPU's in one piece.

Tensors of the host stand in for those of a device, and the native attention over own tokens for
SGLang's attention backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cluster_attention import POOL, Setup, in_pool
from test_stored import GEOMETRY
from test_triton_log_sums import compiled

from sgl_ext.clusters.reader import DeviceError
from sgl_ext.engine.clusters import device, hooks
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.clusters.device import DeviceAttention, DeviceForward
from sgl_ext.engine.clusters.follower import Follower
from sgl_ext.engine.clusters.forward import StoredForward
from sgl_ext.engine.core import runtime
from sgl_ext.engine.cpu.native_attention import batch_of
from sgl_ext.memory.transfer import TransferEngine

SHARES = (0.3, None, 1.0, 0.3, 0.3)
"""Share of each row's follower; None for a row that follows no context. The last one follows
another context than the others."""
DECODE = ([1] * 5, [4, 7, 1, 8, 5])
PREFILL = ([3, 2, 5, 1, 4], [3, 6, 8, 8, 6])
"""New tokens and own tokens of each row; some have no tokens before the forward."""
TABLE = torch.randperm(POOL, generator=torch.Generator().manual_seed(9)).int().view(5, -1)
LINES = [3, 0, 4, 1, 2]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the reference stand in for the Triton kernel."""
    monkeypatch.setitem(
        sys.modules, "sgl_ext_kernels",
        SimpleNamespace(log_sums=SimpleNamespace(log_sums=compiled.reference)),
    )  # fmt: skip


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as found:
        yield found


class Forwards:
    """A forward of the same rows with own tokens in host memory, and on a device."""

    def __init__(
        self,
        setup: Setup,
        lengths: Sequence[int],
        contexts: Sequence[int],
        opened: dict[str, StoredAttention] | None = None,
        shares: Sequence[float | None] = SHARES,
    ) -> None:
        self.setup, self.lengths, self.contexts = setup, lengths, contexts
        self.reqs = [SimpleNamespace(rid=str(row), to_finish=None) for row in range(len(SHARES))]
        self.followers = [
            None if share is None else Follower(("other" if row == 4 else "it",), share, req, 0.0)
            for row, (share, req) in enumerate(zip(shares, self.reqs, strict=True))
        ]
        opened = opened or {}
        self.stored: Any = SimpleNamespace(
            given_up=set(), running=None, _failed=0,
            context=lambda one: opened.get(one.name, setup.attention),
        )  # fmt: skip
        self.stored.lost = partial(StoredContexts.lost, self.stored)
        self.pool: Any = SimpleNamespace(
            start_layer=2, get_key_buffer=lambda layer: setup.pool[layer - 2, :, 0]
        )
        self.batch: Any = SimpleNamespace(
            seq_lens=torch.tensor(contexts), seq_lens_cpu=torch.tensor(contexts),
            req_pool_indices=torch.tensor(LINES), rids=[req.rid for req in self.reqs],
        )  # fmt: skip
        self.lines = TABLE[LINES]  # outlives the batch of its rows
        own = in_pool(self.lines, contexts, lengths)
        self.host = StoredForward(self.stored, self.followers, lengths, own)
        self.rows = batch_of(self.lines, range(len(LINES)), contexts, lengths)

    def device(self) -> DeviceForward:
        return DeviceForward(
            self.stored, self.followers, self.lengths, self.batch, table=TABLE, pool=self.pool,
            geometry=GEOMETRY, native=self.setup.native, missing=GEOMETRY.layers,
        )  # fmt: skip

    def query(self) -> torch.Tensor:
        return self.setup.query(sum(self.lengths)) * 3

    def own(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Returns the attention of all rows to their own tokens."""
        keys, values = self.setup.pool[layer].unbind(1)
        native = self.setup.native
        return native.attend(self.rows, query, keys, values, scale=GEOMETRY.scale)

    def expected(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Returns the attention of all rows, computed in one piece from host memory."""
        keys, values = self.setup.pool[layer].unbind(1)
        out, followed = self.own(layer, query), self.host.followed
        out[followed] = self.host.attend(self.setup.native, layer, query[followed], keys, values)
        return out


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("rows", [DECODE, PREFILL])
def test_merged_attention_is_that_of_one_piece(
    rows: tuple[list[int], list[int]], groups: bool, engine: TransferEngine, tmp_path: Path
) -> None:
    """Rows are parts of prompts or decode; with ``groups``, their blocks do not fit together."""
    setup = Setup(tmp_path, engine, hot=60_000)
    shares = (0.2, None, 0.3, 0.2, 0.3) if groups else SHARES
    if groups:
        setup.memory.most = setup.stored.about.blocks.blocks // 3
    forwards = Forwards(setup, *rows, shares=shares)
    on_device = forwards.device()
    assert on_device.followed.tolist() == forwards.host.followed.tolist()
    for layer in range(GEOMETRY.layers):
        query = forwards.query()
        out = forwards.own(layer, query)
        plain = out.clone()
        on_device.merge(layer, query.flatten(1), merged := out.flatten(1))
        expected = forwards.expected(layer, query)
        torch.testing.assert_close(merged.view(out.shape), expected, rtol=1e-5, atol=1e-5)
        follows = torch.zeros(len(out), dtype=torch.bool)
        follows[forwards.host.followed] = True
        assert torch.equal(out[~follows], plain[~follows])
        assert (out[follows] - plain[follows]).abs().max() > 0.01
    assert not on_device.missing
    assert not forwards.stored.given_up


@pytest.mark.parametrize("rows", [DECODE, PREFILL])
def test_the_same_blocks_are_prefetched(
    rows: tuple[list[int], list[int]], engine: TransferEngine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The prefetch sees the tokens before the forward only: the layer has no others yet."""
    setup = Setup(tmp_path, engine)
    forwards = Forwards(setup, *rows)
    asked: list[np.ndarray] = []
    monkeypatch.setattr(setup.memory, "prefetch", lambda _layer, wanted: asked.append(wanted))
    query, keys = forwards.query()[forwards.host.followed], setup.pool[1, :, 0]
    forwards.host.prefetch(1, query, keys, 1.5)
    expected, asked[:] = [*asked], []
    seen: list[int] = []

    def noted(*given: Any) -> torch.Tensor:
        seen.extend(given[4].tolist())
        return compiled.reference(*given)

    monkeypatch.setattr(sys.modules["sgl_ext_kernels"].log_sums, "log_sums", noted)
    forwards.device().prefetch(1, query, keys, 1.5)
    before = [[context - new] * new for new, context in zip(*rows, strict=True)]
    assert seen == [each for row in forwards.host.rows for each in before[row]]
    assert len(asked) == 2  # parts that do not read all blocks
    assert [each.tolist() for each in asked] == [each.tolist() for each in expected]


def test_rows_of_a_failed_context_keep_the_attention_to_their_own_tokens(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)

    class Broken(StoredAttention):
        def attend(self, *args: Any) -> torch.Tensor:
            args[-1].fill_(7)
            raise DeviceError("it is gone")

    forwards = Forwards(setup, *PREFILL, {"other": Broken(setup.stored, setup.memory)})
    on_device = forwards.device()
    for layer in range(2):
        query = forwards.query()
        out = forwards.own(layer, query)
        plain = out.clone()
        on_device.merge(layer, query, out)
        assert torch.equal(out[-4:], plain[-4:])
        expected = forwards.expected(layer, query)
        torch.testing.assert_close(out[:-4], expected[:-4], rtol=1e-5, atol=1e-5)
    assert forwards.stored.given_up == {"4"}
    assert [req.to_finish is None for req in forwards.reqs] == [True] * 4 + [False]


def test_an_error_of_the_device_ends_the_followers_only(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(sys.modules["sgl_ext_kernels"].log_sums, "log_sums", broken)
    setup = Setup(tmp_path, engine)
    for call in ("merge", "prefetch"):
        forwards = Forwards(setup, *DECODE)
        on_device, query = forwards.device(), forwards.query()
        out = forwards.own(0, query)
        plain = out.clone()
        if call == "prefetch":
            on_device.prefetch(0, query[on_device.followed], setup.pool[0, :, 0], 1.0)
        on_device.merge(0, query, out)
        assert torch.equal(out, plain)
        assert forwards.stored.given_up == {"0", "2", "3", "4"}
        assert "no compiler" in forwards.reqs[0].to_finish.message
        assert forwards.reqs[1].to_finish is None
        assert not setup.attention.failed


def test_own_attention_that_is_not_finite_is_an_error(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)
    forwards = Forwards(setup, *DECODE)
    query = forwards.query()
    out = forwards.own(0, query)
    query[0] = torch.nan
    forwards.device().merge(0, query, out)
    assert {"0"} <= forwards.stored.given_up
    message = forwards.reqs[0].to_finish.message
    assert message == "the attention of layer 0 to the request's own tokens is not finite"
    assert not setup.attention.failed  # others follow the context on


class Recorded:
    """Recorder that notes queries."""

    def __init__(self) -> None:
        self.taking = False
        self.taken: list[int] = []

    def take(self, layer: int, query: torch.Tensor) -> None:
        assert query.shape[1:] == (GEOMETRY.heads, GEOMETRY.head_dim)
        self.taken.append(layer)


class Attention:
    """Attention of a scheduler on a device, over the rows of :class:`Forwards`."""

    def __init__(self, forwards: Forwards, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("require_running", "require_kernels"):
            monkeypatch.setattr(device, name, lambda *_: None)
        self.forwards, self.recorder = forwards, Recorded()
        runner: Any = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=TABLE), token_to_kv_pool=forwards.pool
        )
        recorder: Any = self.recorder
        self.device = DeviceAttention(forwards.stored, recorder, runner, None, GEOMETRY)  # type: ignore[arg-type]

    def layer(self, number: int) -> None:
        query = self.forwards.query()
        out = self.forwards.own(number, query)
        self.device.attended(number + 2, query.flatten(1), out)


@pytest.fixture
def attention(engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attention:
    return Attention(Forwards(Setup(tmp_path, engine), *PREFILL), monkeypatch)


def test_rows_of_beams_follow_no_context() -> None:
    one: Any = object()
    stored: Any = SimpleNamespace(_followers={"a": one})
    assert StoredContexts.followers(stored, ["b", "a"], 4) == [None, one, None, None]
    assert StoredContexts.followers(stored, ["b"], 2) == []
    stored._followers = {}
    assert StoredContexts.followers(stored, ["a"], 1) == []


def test_a_forward_with_followers_is_eager_until_its_last_layer(attention: Attention) -> None:
    on_device, forwards = attention.device, attention.forwards
    assert not on_device.eager
    for _ in range(2):
        on_device.begin(forwards.batch, forwards.followers, forwards.lengths)
        assert on_device.eager
        assert forwards.stored.running is not None
        for layer in range(GEOMETRY.layers):
            assert on_device.eager
            attention.layer(layer)
        assert not on_device.eager
        assert forwards.stored.running is None
    on_device.begin(forwards.batch, [], forwards.lengths)
    assert not on_device.eager
    assert not attention.recorder.taken
    attention.recorder.taking = True
    on_device.begin(forwards.batch, [], forwards.lengths)
    assert on_device.eager
    attention.layer(1)
    assert attention.recorder.taken == [1]
    assert not forwards.stored.given_up


@pytest.mark.parametrize("first", [1, GEOMETRY.layers - 1])
def test_a_forward_goes_on_with_other_rows(attention: Attention, first: int) -> None:
    """Rows 0, 2 and 4 go on, of row 2 the last token only; all layers' calls are counted."""
    on_device, forwards = attention.device, attention.forwards
    on_device.begin(forwards.batch, forwards.followers, forwards.lengths)
    for layer in range(first):
        attention.layer(layer)
    some, lengths = [0, 2, 4], [forwards.lengths[0], 1, forwards.lengths[4]]
    contexts = [forwards.contexts[row] for row in some]
    followers = [forwards.followers[row] for row in some]
    lines = [LINES[row] for row in some]
    batch: Any = SimpleNamespace(
        seq_lens=torch.tensor(contexts), seq_lens_cpu=torch.tensor(contexts),
        req_pool_indices=torch.tensor(lines),
    )  # fmt: skip
    on_device.go_on(batch, followers, lengths)
    table = TABLE[lines]
    rows = batch_of(table, range(len(lines)), contexts, lengths)
    host = StoredForward(forwards.stored, followers, lengths, in_pool(table, contexts, lengths))
    native = forwards.setup.native
    for layer in range(first, GEOMETRY.layers):
        assert on_device.eager
        query = forwards.setup.query(sum(lengths)) * 3
        keys, values = forwards.setup.pool[layer].unbind(1)
        out = native.attend(rows, query, keys, values, scale=GEOMETRY.scale)
        expected = out.clone()
        asked = query[host.followed]
        expected[host.followed] = host.attend(native, layer, asked, keys, values)
        on_device.attended(layer + 2, query.flatten(1), out)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not on_device.eager
    on_device.begin(forwards.batch, [], forwards.lengths)
    on_device.go_on(batch, [], lengths)
    assert not on_device.eager
    assert not forwards.stored.given_up


@pytest.mark.parametrize("how", ["next forward", "result"])
def test_a_model_that_skips_attention_layers_ends_its_followers(
    how: str, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device, forwards = attention.device, attention.forwards
    on_device.begin(forwards.batch, forwards.followers, forwards.lengths)
    for layer in range(GEOMETRY.layers - 1):
        attention.layer(layer)
    if how == "next forward":
        on_device.begin(forwards.batch, [], forwards.lengths)
    else:
        power = SimpleNamespace(device=on_device, stored=forwards.stored)
        monkeypatch.setattr(runtime, "current", SimpleNamespace(clusters=power))
        req: Any = SimpleNamespace(rid="2", output_ids=[5, 6])
        hooks._on_finish(req)
        hooks._on_finish(req)  # its next forward is whole
        assert (req.output_ids, forwards.stored._failed) == ([5], 1)
        forwards.stored.given_up.add("2")
    assert forwards.stored.given_up == {"0", "2", "3", "4"}
    assert "attention in 2 of 3 layers" in forwards.reqs[2].to_finish.message
    assert not on_device.eager


def test_attention_is_sglangs_where_no_power_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = SimpleNamespace(layer_id=3)
    query, out = torch.zeros(2, 4), torch.ones(2, 4)
    calls: list[tuple[object, ...]] = []
    open_device = SimpleNamespace(attended=lambda *given: calls.append(given))
    for current in (
        None, SimpleNamespace(clusters=None),
        SimpleNamespace(clusters=SimpleNamespace(device=None)),
        SimpleNamespace(clusters=SimpleNamespace(device=open_device)),
    ):  # fmt: skip
        assert not calls
        monkeypatch.setattr(runtime, "current", current)
        found = hooks._attended(lambda *_, **__: out, layer, query, None, None, save_kv_cache=True)
        assert found is out
    assert calls == [(3, query, out)]
