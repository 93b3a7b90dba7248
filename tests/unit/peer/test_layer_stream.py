"""Tests of forwards through layer buffers, which read and leave the same KV as over the pool."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from sgl_ext.config.values import EmulatedDevice
from sgl_ext.engine.peer.stream import LayerStream
from sgl_ext.memory.lent import Lendable, map_memory
from sgl_ext.memory.mapping import PAGE
from sgl_ext.memory.slab import HostSlab, Layout

LAYOUT = Layout(page=4, layers=5, kv_heads=2, head_dim=16, dtype="float32", fingerprint="a model")
OWN, BEYOND = 40, 48


class Engine:
    """KV pool with own and borrowed blocks, and a layer stream over it."""

    def __init__(self, buffers: int, **options: object) -> None:
        self.slab = HostSlab.create(LAYOUT, OWN, beyond=BEYOND)
        lender = HostSlab.create(LAYOUT, 24)
        self.lender = lender  # keeps the file open
        lendable = Lendable(lender.mapping, lender.fd, lender.name, 0, lender.size)
        block = LAYOUT.block_bytes
        end = (OWN + 16 + lendable.size // block) * block // PAGE * PAGE
        map_memory(self.slab.mapping, end - lendable.size, os.getpid(), lendable.extents)
        self.blocks = range(-(-(end - lendable.size) // block), end // block)
        tokens = self.slab.tensor().flatten(0, 1)
        self.pool = SimpleNamespace(get_key_buffer=lambda layer: tokens[:, layer, 0])
        self.tokens = tokens
        self.stream = LayerStream(self.slab, self.pool, buffers, **options)  # type: ignore[arg-type]
        self.stream.enabled = True

    def slots(self, *blocks: int) -> torch.Tensor:
        return torch.cat([torch.arange(b * 4, b * 4 + 4) for b in blocks])


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


def forward(engine: Engine, table: torch.Tensor, contexts: list[int], new: torch.Tensor) -> None:
    """Runs a forward like an attention backend, and verifies the KV that each layer reads."""
    stream, layers = engine.stream, LAYOUT.layers
    stream.begin(table, list(range(len(contexts))), contexts, new)
    boundary = OWN * LAYOUT.page
    written = []
    for layer in range(layers):
        keys, values = torch.randn(2, len(new), 2, 16).unbind()
        where, k, v = (new, keys, values)
        if stream.active:
            where, k, v = stream.save(layer, new, keys, values)
        engine.tokens[where, layer, 0], engine.tokens[where, layer, 1] = k, v
        if stream.active:
            elsewhere = stream.layer(layer)
            for request, context in enumerate(contexts):
                for slot in table[request, :context].tolist():
                    if slot < boundary:
                        continue
                    found = elsewhere[slot - boundary]
                    at = (new == slot).nonzero()
                    if len(at):
                        expected = torch.stack([keys[at[0, 0]], values[at[0, 0]]])
                    else:
                        expected = engine.tokens[slot, layer]
                    assert torch.equal(found, expected), (layer, slot)
            stream.done(layer)
        written.append((keys, values))
    assert not stream.active
    for layer, (keys, values) in enumerate(written):
        assert torch.equal(engine.tokens[new, layer, 0], keys)
        assert torch.equal(engine.tokens[new, layer, 1], values)


def test_layers_are_loaded_and_new_tokens_are_stored(engine: Engine) -> None:
    first, last = engine.blocks[0], engine.blocks[-1]
    engine.tokens[: OWN * 4] = torch.randn(OWN * 4, 5, 2, 2, 16)
    engine.tokens[first * 4 : (last + 1) * 4] = torch.randn((last - first + 1) * 4, 5, 2, 2, 16)
    table = torch.zeros(2, 24, dtype=torch.int32)
    table[0] = engine.slots(1, 2, first, first + 1, last, 3)
    table[1] = engine.slots(1, 2, first, first + 5, first + 4, 4)
    forward(engine, table, [20, 18], torch.tensor([4 * last + 3, 4 * first + 16, 4 * first + 17]))
    assert engine.stream.forward_bytes == (15 + 3) * 5 * 256
    forward(engine, table, [8, 8], torch.tensor([3, 4]))  # no borrowed blocks
    assert not engine.stream.active


def test_a_failed_forward_does_not_affect_the_next_one(engine: Engine) -> None:
    first = engine.blocks[0]
    engine.tokens[first * 4 : first * 4 + 8] = 1.0
    table = engine.slots(first, first + 1).to(torch.int32).unsqueeze(0)
    engine.stream.begin(table, [0], [8], torch.tensor([4 * first + 7]))
    engine.stream.save(0, torch.tensor([4 * first + 7]), torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    forward(engine, table, [8], torch.tensor([4 * first + 7]))


@pytest.mark.parametrize(
    "slow", [{"link": EmulatedDevice(bytes_per_second=64 << 10)}, {"busy_rate": 64 << 10}]
)
def test_a_forward_waits_for_a_slow_link(slow: dict[str, object]) -> None:
    engine = Engine(2, **slow)
    engine.stream.worker_busy = "busy_rate" in slow
    first = engine.blocks[0]
    table = engine.slots(first, first + 1).to(torch.int32).unsqueeze(0)
    engine.tokens[first * 4 : first * 4 + 8] = 1.0
    forward(engine, table, [8], torch.tensor([4 * first + 7]))
    assert engine.stream.forward_bytes == 8 * 5 * 256
    assert engine.stream.waited_seconds > 0.05  # 10 KiB at 64 KiB a second take 0.16 s


def test_buffers_are_in_the_last_own_blocks(engine: Engine) -> None:
    stream, block = engine.stream, LAYOUT.block_bytes
    buffers = len(stream._buffers)
    taken = stream.blocks(engine.slab, buffers)
    assert taken == -(-buffers * BEYOND // LAYOUT.layers)
    first = stream._buffers.data_ptr() - engine.slab.address
    assert first == (OWN - taken) * block
    assert first + stream._buffers.nbytes <= OWN * block
