"""Tests of attention over a stored context, which equals attention over its selected blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import until
from msgspec.structs import replace
from test_stored import GEOMETRY, OPTIONS, TOKENS, devices_of, recorded_context

from sgl_ext.clusters.build import build
from sgl_ext.clusters.geometry import Geometry
from sgl_ext.clusters.paths import index_file
from sgl_ext.clusters.reader import DeviceError, Reading
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.clusters.stored import Stored
from sgl_ext.config import Clusters, ExtConfig
from sgl_ext.engine.clusters import attention
from sgl_ext.engine.clusters.attention import StoredAttention
from sgl_ext.engine.clusters.follower import Follower
from sgl_ext.engine.clusters.forward import StoredForward
from sgl_ext.engine.clusters.memory import StoredMemory
from sgl_ext.engine.clusters.own import Own, OwnTokensError
from sgl_ext.engine.clusters.power import ClustersPower, _refuse
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine

PADDED = replace(GEOMETRY, head_dim=48)
"""Geometry whose blocks are not full, so that their entries are copied."""
POOL = 40
"""Number of slots of the pool, for tokens behind the context."""


class Setup:
    """Stored context, and the same context in one pool for comparison."""

    def __init__(
        self,
        directory: Path,
        engine: TransferEngine,
        *,
        copies: int = 1,
        geometry: Geometry = GEOMETRY,
        **options: int,
    ) -> None:
        self.geometry = geometry
        self.directories = [directory / f"device{at}" for at in range(3)]
        for each in self.directories:
            each.mkdir()
        self.recorded: Recorded = recorded_context(geometry)
        build(self.recorded, "a", self.directories, OPTIONS, copies=copies)
        self.stored = Stored.open("a", self.directories, self.geometry)
        devices = devices_of(engine, self.directories)
        self.memory = StoredMemory(
            engine, devices, self.stored, **{"hot": 0, "most": 1000, "deadline": 20, **options}
        )
        self.attention = StoredAttention(self.stored, self.memory)
        self.native = NativeAttention()
        chance = torch.Generator().manual_seed(3)
        shape = (self.geometry.layers, POOL, 2, self.geometry.kv_heads, self.geometry.head_dim)
        self.pool = torch.randn(shape, generator=chance)
        context = torch.from_numpy(self.recorded.kv.copy()).view(torch.float32)
        self.whole = torch.cat(
            [context.view(self.geometry.layers, TOKENS, *shape[2:]), self.pool], 1
        )
        self.chance = chance

    def query(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.geometry.heads, self.geometry.head_dim, generator=self.chance)

    def sparse(
        self, layer: int, query: torch.Tensor, own: Own, share: float
    ) -> tuple[torch.Tensor, np.ndarray]:
        keys, values = self.pool[layer].unbind(1)
        chosen = self.attention._select(layer, query, keys, own, share)
        found = self.attention.attend(self.native, layer, query, keys, values, own, share)
        return found, chosen

    def expected(
        self, layer: int, query: torch.Tensor, own: Own, chosen: np.ndarray
    ) -> torch.Tensor:
        """Returns the attention of each row by itself, over one pool that has all the KV."""
        about, block = self.stored.about, self.stored.about.blocks.block
        order = self.stored.layers[layer].order.reshape(-1, block)
        rows, contexts = [], []
        for row, slots in enumerate(seen_by(own)):
            middle = about.sinks + order[chosen[row]].ravel()
            near = np.arange(about.sinks), np.arange(TOKENS - about.window, TOKENS)
            mine = TOKENS + slots
            rows.append(np.concatenate([near[0], middle, near[1], mine]))
            contexts.append(len(rows[-1]))
        table = torch.zeros(len(rows), max(contexts), dtype=torch.int32)
        for row, slots in enumerate(rows):
            table[row, : len(slots)] = torch.from_numpy(slots)
        keys, values = self.whole[layer].unbind(1)
        batch = batch_of(table, range(len(rows)), contexts, [1] * len(rows))
        return self.native.attend(batch, query, keys, values, scale=self.geometry.scale)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as found:
        yield found


def own_tokens(rows: int, generator: torch.Generator) -> Own:
    """Returns the own tokens of a request with ``rows - 1`` rows and of one with one row."""
    slots, new = [], []
    for count in (rows - 1, 1):
        if count:
            begin = int(torch.randint(1, 9, (1,), generator=generator))
            slots.append(torch.randperm(POOL, generator=generator)[: begin + count - 1].numpy())
            new.append(count)
    return Own.of(slots, new)


def in_pool(
    table: torch.Tensor, contexts: Sequence[int], lengths: Sequence[int]
) -> Callable[[Sequence[int]], Own]:
    """Returns what gives the own tokens of some rows, each of which has a line of a table."""

    def own(rows: Sequence[int]) -> Own:
        slots = [table[row, : contexts[row]].long().numpy() for row in rows]
        return Own.of(slots, [lengths[row] for row in rows])

    return own


def seen_by(own: Own) -> list[np.ndarray]:
    """Returns the slots of the own tokens that each row sees."""
    return [
        own.slots[start : start + length]
        for start, length in zip(own.starts, own.lengths, strict=True)
    ]


def test_each_row_sees_its_requests_tokens_up_to_its_own() -> None:
    own = Own.of([np.array([7, 8, 9]), np.array([4, 5])], [2, 1])
    assert [each.tolist() for each in seen_by(own)] == [[7, 8], [7, 8, 9], [4, 5]]
    assert own.before.tolist() == [1, 1, 1]
    assert [each.tolist() for each in seen_by(own.only(slice(1, 3)))] == [[7, 8, 9], [4, 5]]


@pytest.mark.parametrize("geometry", [GEOMETRY, PADDED])
@pytest.mark.parametrize("options", [{}, {"hot": 60_000}, {"hot": 60_000, "most": 36}])
def test_rows_attend_to_the_selected_blocks(
    options: dict[str, int], geometry: Geometry, engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine, geometry=geometry, **options)
    in_place = setup.memory._asked.first is not None
    assert in_place == (geometry is GEOMETRY)
    for step in range(25):
        layer, share = step % 3, (0.05, 0.1, 0.25)[step % 3 - step // 9 % 2]
        own = own_tokens(1 + step % 5, setup.chance)
        query = setup.query(1 + step % 5) * 3
        found, chosen = setup.sparse(layer, query, own, share)
        torch.testing.assert_close(found, setup.expected(layer, query, own, chosen), rtol=0, atol=0)
    memory = setup.memory
    assert memory.requests <= memory.fetched.sum()
    assert (memory.hits.sum() > 0) == ("hot" in options)


def test_a_share_of_one_equals_dense_attention(engine: TransferEngine, tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine, hot=60_000)
    for layer in range(3):
        own = own_tokens(3, setup.chance)
        query = setup.query(3)
        keys, values = setup.pool[layer].unbind(1)
        found = setup.attention.attend(setup.native, layer, query, keys, values, own, 1.0)
        slots = torch.arange(TOKENS, dtype=torch.int32).expand(3, -1)
        mine = np.zeros((3, own.lengths.max()), np.int32)
        for row, seen in enumerate(seen_by(own)):
            mine[row, : len(seen)] = TOKENS + seen
        table = torch.cat([slots, torch.from_numpy(mine)], 1).contiguous()
        contexts = (TOKENS + own.lengths).tolist()
        batch = batch_of(table, range(3), contexts, [1] * 3)
        keys, values = setup.whole[layer].unbind(1)
        dense = setup.native.attend(batch, query, keys, values, scale=GEOMETRY.scale)
        assert torch.equal(found, dense)


def test_frequently_wanted_blocks_are_not_read_again(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine, hot=3 * 30 * 16 * GEOMETRY.entry_bytes)
    own, query = own_tokens(1, setup.chance), setup.query(1)
    for _ in range(40):
        setup.sparse(1, query, own, 0.1)
    before = setup.memory.fetched.sum()
    setup.sparse(1, query, own, 0.1)
    assert setup.memory.fetched.sum() == before


@pytest.mark.parametrize("hot", [0, 60_000])
@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("geometry", [GEOMETRY, PADDED])
def test_prefetched_blocks_are_not_read_again(
    geometry: Geometry, hot: int, times: float, engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine, hot=hot, geometry=geometry)
    for step in range(12):
        layer, rows = step % 3, 1 + step % 4
        own, query = own_tokens(rows, setup.chance), setup.query(rows) * 3
        expected = [setup.query(rows), query][step % 2]  # the wrong ones first
        before = setup.memory.fetched.sum()
        setup.attention.prefetch(layer, expected, setup.pool[layer, :, 0], own, 0.1, times)
        found, chosen = setup.sparse(layer, query, own, 0.1)
        torch.testing.assert_close(found, setup.expected(layer, query, own, chosen), rtol=0, atol=0)
        if times == 2 and step % 2:
            # The new tokens' own keys were not known, so a few blocks may differ.
            assert setup.memory.fetched.sum() - before <= 0.2 * len(np.unique(chosen))
    assert setup.memory.prefetched.sum() > 0


def test_blocks_are_prefetched_one_layer_early(engine: TransferEngine, tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine)
    keys = setup.pool[:, :, 0]
    for _ in range(3):
        own = own_tokens(2, setup.chance)
        query = [setup.query(2) * 3 for _ in range(3)]
        for layer in range(3):
            before = setup.memory.fetched.copy(), setup.memory.prefetched.copy()
            for _ in range(2):  # as two parts of a forward do
                if layer < 2:
                    ahead = layer + 1
                    setup.attention.prefetch(ahead, query[ahead], keys[ahead], own, 0.1, 2.0)
            found, chosen = setup.sparse(layer, query[layer], own, 0.1)
            expected = setup.expected(layer, query[layer], own, chosen)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            count = len(np.unique(chosen))
            prefetched = setup.memory.prefetched[layer] - before[1][layer]
            assert prefetched + setup.memory.fetched[layer] - before[0][layer] == count
            assert (prefetched >= 0.8 * count) == (layer > 0)


def test_a_poorly_predicted_layer_is_not_prefetched(engine: TransferEngine, tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine)
    last = np.array([setup.stored.about.blocks.blocks - 1])
    for _ in range(20):
        setup.memory.prefetch(1, last)
        setup.memory.bring(1, np.arange(3))
    before = setup.memory.requests
    setup.memory.prefetch(1, last)
    assert setup.memory.requests == before
    setup.memory.prefetch(2, last)
    assert setup.memory.requests == before + 1


def test_errors_of_prefetches_are_raised_when_blocks_are_wanted(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)
    own, query = own_tokens(2, setup.chance), setup.query(2)
    keys = setup.pool[0, :, 0]
    file = setup.stored.files[1]
    contents = file.read_bytes()
    os.truncate(file, 0)
    setup.attention.prefetch(0, query, keys, own, 0.3, 1.0)
    with pytest.raises(DeviceError, match="device 1 cannot be read"):
        setup.sparse(0, query, own, 0.3)
    setup.attention.prefetch(0, query, keys, own, 0.3, 1.0)
    file.write_bytes(contents)
    found, chosen = setup.sparse(0, query, own, 0.3)
    assert torch.equal(found, setup.expected(0, query, own, chosen))
    harmed = bytearray(contents)
    harmed[::512] = bytes(byte ^ 1 for byte in harmed[::512])
    file.write_bytes(harmed)
    setup.attention.prefetch(0, query, keys, own, 0.3, 1.0)
    with pytest.raises(DeviceError, match="blocks are damaged"):
        setup.sparse(0, query, own, 0.3)


def test_rows_whose_blocks_do_not_fit_together_are_served_in_groups(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine, hot=60_000)
    blocks = setup.stored.about.blocks.blocks
    most = setup.memory.most = blocks // 3
    own, query = own_tokens(37, setup.chance), setup.query(37) * 3
    for _ in range(3):  # blocks that several groups made hot are right, too
        found, chosen = setup.sparse(0, query, own, 0.1)
        assert len(np.unique(chosen)) > most
        torch.testing.assert_close(found, setup.expected(0, query, own, chosen), rtol=0, atol=0)


def test_fewer_rows_are_selected_at_a_time_if_a_context_has_more_entries(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path, engine, hot=60_000)
    assert setup.attention._rows == attention._ROWS
    scores = setup.stored.about.blocks.entries * (setup.geometry.kv_heads + 1)
    monkeypatch.setattr(attention, "_SCORES", 3 * scores + 1)
    setup.attention = StoredAttention(setup.stored, setup.memory)
    assert setup.attention._rows == 3
    own, query = own_tokens(7, setup.chance), setup.query(7) * 3
    found, chosen = setup.sparse(0, query, own, 0.1)
    torch.testing.assert_close(found, setup.expected(0, query, own, chosen), rtol=0, atol=0)


def test_a_hanging_device_is_waited_for_once(engine: TransferEngine, tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine)
    own, query = own_tokens(1, setup.chance), setup.query(1)
    setup.attention.prefetch(0, query, setup.pool[0, :, 0], own, 0.1, 1.0)
    area = setup.memory._ahead[0]
    reading, waits = area.reading, []
    assert reading is not None
    assert area.prefetched is not None

    def wait(deadline: float) -> None:
        waits.append(deadline)
        raise DeviceError("device0 gave nothing in time")

    area.reading = SimpleNamespace(finished=False, wait=wait)  # type: ignore[assignment]
    with pytest.raises(DeviceError, match="in time"):
        setup.sparse(0, query, own, 0.1)
    assert len(waits) == 1
    area.reading = reading


def test_a_device_that_hangs_while_a_context_is_opened_keeps_no_memory(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)
    setup.memory.close()
    assert not engine._owners
    slow = devices_of(engine, setup.directories, 1 << 16)
    hot = 100 * 4096 * GEOMETRY.layers
    with pytest.raises(DeviceError, match=r"device \d returned [\d,]+ of [\d,]+ B"):
        StoredMemory(engine, slow, setup.stored, hot=hot, most=1000, deadline=0.01)
    assert engine._owners  # devices may still write into the memory

    def released() -> bool:
        engine.release()
        return not engine._owners and not engine._released

    until(released)


def test_a_share_that_does_not_fit_is_refused(engine: TransferEngine, tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine, most=5)
    with pytest.raises(
        ExtError, match=r"selects \d+ blocks of the context per query, but at most 5 fit"
    ):
        setup.sparse(0, setup.query(1), own_tokens(1, setup.chance), 0.5)


def test_a_failed_device_causes_errors_not_wrong_outputs(
    engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)
    own, query = own_tokens(2, setup.chance), setup.query(2)
    file = setup.stored.files[1]
    contents = file.read_bytes()
    os.truncate(file, 0)
    with pytest.raises(DeviceError, match="device 1 cannot be read"):
        setup.sparse(0, query, own, 0.3)
    file.write_bytes(contents)  # the device works again
    found, chosen = setup.sparse(0, query, own, 0.3)
    assert torch.equal(found, setup.expected(0, query, own, chosen))
    # A read in progress may still write where the next one would.
    setup.memory._asked.reading = SimpleNamespace(finished=False)  # type: ignore[assignment]
    with pytest.raises(DeviceError, match="an earlier read from a device is still pending"):
        setup.sparse(0, query, own, 0.3)


@pytest.mark.parametrize("times", [0, 1.5])
@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", ["it fails", "it is damaged", "it hangs", "its file is gone"])
def test_any_device_may_be_lost_if_there_are_two_copies(
    how: str, lost: int, times: float, engine: TransferEngine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    setup = Setup(tmp_path, engine, copies=2, hot=4 * 4096 * GEOMETRY.layers, deadline=1)
    own, query = own_tokens(5, setup.chance), setup.query(5)
    expected = [setup.sparse(layer, query, own, 0.3)[0] for layer in range(GEOMETRY.layers)]
    assert setup.memory.describe()["lost"] == []
    file = setup.stored.files[lost]
    if how == "it fails":
        os.truncate(file, 0)
    elif how == "it is damaged":
        file.write_bytes(os.urandom(file.stat().st_size))
    elif how == "it hangs":
        wait, late = Reading._wait, set[int]()

        def hang(reading: Reading, ticket: Any, device: Any, timeout: float) -> None:
            if device.number == lost:
                late.add(id(reading))
                raise DeviceError(f"device {lost} is late", (lost,))
            wait(reading, ticket, device, timeout)

        monkeypatch.setattr(Reading, "_wait", hang)
        monkeypatch.setattr(Reading, "finished", property(lambda each: id(each) not in late))
    else:
        setup.memory.close()
        file.unlink()
        index_file(setup.directories[lost], "a").unlink(missing_ok=True)  # of the first two
        stored = Stored.open("a", setup.directories, GEOMETRY)
        assert stored.lost == {lost}
        devices = devices_of(engine, setup.directories)
        setup.memory = StoredMemory(engine, devices, stored, hot=0, most=1000, deadline=1)
        setup.attention = StoredAttention(stored, setup.memory)
    for _ in range(2):
        for layer in range(GEOMETRY.layers):
            if times:
                keys = setup.pool[layer][:, 0]
                setup.attention.prefetch(layer, query, keys, own, 0.3, times)
            found, _ = setup.sparse(layer, query, own, 0.3)
            assert torch.equal(found, expected[layer])
    assert setup.memory.describe()["lost"] == [lost]
    assert f"device {lost} is lost" in caplog.text
    # Without a second device, the rest of the blocks is missing.
    other = setup.stored.files[(lost + 1) % 3]
    os.truncate(other, 0)
    with pytest.raises(DeviceError):
        setup.sparse(0, setup.query(5), own, 0.9)
    with pytest.raises(ExtError, match=r"store it again"):
        for each in (file, other):
            each.unlink(missing_ok=True)
        Stored.open("a", setup.directories, GEOMETRY)


@pytest.mark.parametrize("error", [IndexError("it is cut"), DeviceError("it is gone")])
def test_an_error_of_a_context_ends_only_its_own_requests(
    error: Exception, engine: TransferEngine, tmp_path: Path
) -> None:
    setup = Setup(tmp_path, engine)

    class Broken(StoredAttention):
        def prefetch(self, *args: Any) -> None:
            if isinstance(error, IndexError):
                raise error

        def attend(self, *args: Any) -> torch.Tensor:
            raise error

    contexts = {"good": setup.attention, "bad": Broken(setup.stored, setup.memory)}
    stored = SimpleNamespace(given_up=set(), context=lambda follower: contexts[follower.name])
    reqs = [SimpleNamespace(rid=str(at), to_finish=None) for at in range(4)]
    followers = [
        Follower(("good",), 0.3, reqs[0], 0.0), Follower(("bad",), 0.3, reqs[1], 0.0), None,
        Follower(("bad",), 0.2, reqs[3], 0.0),
    ]  # fmt: skip
    table = torch.arange(POOL, dtype=torch.int32).reshape(4, -1)
    lengths, contexts_ = [1, 2, 1, 1], [5, 6, 7, 8]
    own_of = in_pool(table, contexts_, lengths)
    forward = StoredForward(stored, followers, lengths, own_of)  # type: ignore[arg-type]
    query = setup.query(5)
    for layer in range(2):
        keys, values = setup.pool[layer].unbind(1)
        forward.prefetch(layer, query[forward.followed], keys, 1.0)
        out = torch.full_like(query, 7.0)
        followed = query[forward.followed]
        out[forward.followed] = forward.attend(setup.native, layer, followed, keys, values)
        own = Own.of([table[0, :5].long().numpy()], [1])
        alone = setup.attention.attend(setup.native, layer, query[:1], keys, values, own, 0.3)
        assert torch.equal(out[:1], alone)
        assert (out[[1, 2, 4]] == 0).all()
        assert (out[3] == 7).all()  # follows no context
    assert stored.given_up == {"1", "3"}
    assert [req.to_finish is None for req in reqs] == [True, False, True, False]
    assert str(error) in reqs[1].to_finish.message
    # A device may recover. After another error, the memory of the context may be inconsistent.
    assert bool(contexts["bad"].failed) == isinstance(error, IndexError)


def test_a_failure_of_the_first_layers_is_kept_when_a_forward_goes_on(
    engine: TransferEngine, tmp_path: Path
) -> None:
    """The failed rows' output stays 0, and the device is not waited for again."""
    setup = Setup(tmp_path, engine)
    asked: list[int] = []

    class Gone(StoredAttention):
        def attend(self, *given: Any) -> torch.Tensor:
            asked.append(given[1])
            raise DeviceError("it is gone")

    contexts = {"good": setup.attention, "bad": Gone(setup.stored, setup.memory)}
    reqs = [SimpleNamespace(rid=str(at), to_finish=None) for at in range(3)]
    followers = {
        req.rid: Follower(("good" if at else "bad",), 0.3, req, 0.0, tokens=TOKENS)  # type: ignore[arg-type]
        for at, req in enumerate(reqs[:2])
    }
    stored: Any = SimpleNamespace(
        given_up=set(), running=None, context=lambda one: contexts[one.name],
        followers=lambda rids, _rows: [followers.get(rid) for rid in rids],
    )  # fmt: skip
    power: Any = ClustersPower(ExtConfig(), Clusters(directories=[tmp_path]))
    table = torch.arange(POOL, dtype=torch.int32).reshape(4, -1)
    power._runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    power.stored, power.recorder = stored, SimpleNamespace(
        any=False, begin=lambda *_: None, go_on=lambda *_: None
    )  # fmt: skip

    def batch(ends: list[int], lengths: list[int]) -> Any:
        return SimpleNamespace(
            rids=[req.rid for req in reqs], seq_lens_cpu=torch.tensor(ends),
            req_pool_indices=torch.tensor([2, 0, 1]), extend_seq_lens_cpu=lengths,
            forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False),
        )  # fmt: skip

    for call, ends, lengths in (
        (lambda of: power.launching(of, whole=False), [5, 6, 7], [2, 3, 1]),
        (power.cut_over, [5, 6, 7], [1, 2, 1]),
    ):  # fmt: skip
        call(batch(ends, lengths))
        forward, layer = power.following, len(lengths) - sum(lengths) // 2
        query = setup.query(sum(lengths))
        keys, values = setup.pool[layer].unbind(1)
        found = torch.full_like(query, 7.0)
        followed = query[forward.followed]
        found[forward.followed] = forward.attend(setup.native, layer, followed, keys, values)
        good = slice(lengths[0], lengths[0] + lengths[1])
        own = Own.of([table[0, : ends[1]].long().numpy()], [lengths[1]])
        alone = setup.attention.attend(setup.native, layer, query[good], keys, values, own, 0.3)
        assert torch.equal(found[good], alone)
        assert (found[: lengths[0]] == 0).all()
        assert (found[-1] == 7).all()  # follows no context
    assert len(asked) == 1
    assert stored.given_up == {"0"}
    assert [req.to_finish is None for req in reqs] == [False, True, True]


def test_attention_that_is_not_finite_is_an_error(engine: TransferEngine, tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine)
    own, query = own_tokens(2, setup.chance), setup.query(2)
    setup.memory.slots[setup.memory.first(0)] = torch.nan
    with pytest.raises(ExtError, match="attention of layer 0 to the context is not finite; store"):
        setup.sparse(0, query, own, 0.3)
    setup.pool[0, own.slots[0], 1] = torch.inf
    with pytest.raises(OwnTokensError, match="layer 0 of the request's own tokens are not finite"):
        setup.sparse(0, query, own, 0.3)
    setup.attention.failed = "context a is disabled"
    with pytest.raises(ExtError, match="context a is disabled"):
        setup.sparse(1, query, own, 0.3)


def test_a_request_whose_context_cannot_be_read_is_answered_with_503() -> None:
    for error, status in (
        (DeviceError("device 0 does not respond"), 503), (ExtError("no such context"), 400),
    ):  # fmt: skip
        answered: list[object] = []
        req: Any = SimpleNamespace(
            set_finish_with_abort=lambda *given, to=answered: to.extend(given)
        )
        _refuse(req, error)
        assert answered == [str(error), status]
        assert req.skip_radix_cache_insert
