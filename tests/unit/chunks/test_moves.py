"""Moves of linked KV: the native implementation, and that of devices in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from faked_cuda_kit import environment, lines
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rope_kit import tables
from test_rotation import rope
from test_triton_rotate import load_rotate
from tier_kit import arena

from sgl_ext.engine.chunks.moves import DeviceMoves, HostMoves, Move, Moves
from sgl_ext.engine.chunks.rope import verified_rope
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.holds import Holds
from sgl_ext.tiers.host import HostPages

load_rotate("interpreted_moves", interpret=True)
TOKENS, PAGES = 96, 6


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """Has the implementation for devices import kernels that Triton interprets."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = importlib.import_module("interpreted_moves")
        patch.setitem(sys.modules, "sgl_ext_kernels", kernels)
        yield


class Memory:
    """Slab and host memory of random KV, and both implementations of moves over them."""

    def __init__(self, page: int, dtype: str, head_dim: int, *, interleaved: bool = False) -> None:
        self.layout = Layout(page, 2, 2, head_dim, dtype, "f")
        self.engine = TransferEngine()
        slab = HostSlab.create(self.layout, TOKENS // page)
        self.host = arena(self.engine, PAGES * 16 // page, self.layout)
        self.engine.register(slab.address, slab.size, owner=slab)
        self.slab = slab.tensor()
        self.pages = torch.from_numpy(self.host.memory[:, : self.layout.block_bytes])
        self.pages = self.pages.view(self.slab.dtype)
        chance = torch.Generator().manual_seed(page)
        for each in (self.slab, self.pages):
            each.copy_(torch.randn(each.shape, generator=chance))
        copies = DeviceCopies(self.engine, self.engine.host_lane(), slab, self.host)
        holds = Holds(HostPages(PAGES), copies, None, Counter())  # type: ignore[arg-type]
        how = rope(head_dim // 2, interleaved=interleaved)
        self.native = HostMoves(self.layout, how, self.slab, holds)
        self.device = DeviceMoves(self.layout, how, self.slab, holds)

    def after(self, move: Moves, moves: list[Move]) -> torch.Tensor:
        """Returns the slab's bytes after the moves, and restores it."""
        before, host = self.slab.clone(), self.host.memory.copy()
        move(moves)
        found = self.slab.clone()
        self.slab.copy_(before)
        np.testing.assert_array_equal(self.host.memory, host)
        return found.flatten(0, 1).view(torch.uint8)

    def compare(self, moves: list[Move]) -> None:
        """Compares both implementations, and checks that only the targets change."""
        native, device = self.after(self.native, moves), self.after(self.device, moves)
        assert torch.equal(native, device)
        kept = np.delete(np.arange(TOKENS), np.concatenate([move.targets for move in moves]))
        assert torch.equal(device[kept], self.slab.flatten(0, 1).view(torch.uint8)[kept])


@pytest.fixture(scope="module", params=[1, 16])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = Memory(request.param, "bfloat16", 64)
    with made.engine:
        yield made


def long(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def move(slots: Any, places: Any, offsets: Any, targets: Any, delta: int) -> Move:
    arrays = [np.asarray(each, np.int64) for each in (slots, places, offsets, targets)]
    return Move(torch.from_numpy(arrays[0]), *arrays[1:], delta)


SPAN = np.arange(9, 42)  # crosses two boundaries of pages and is not aligned with the targets


@pytest.mark.parametrize("delta", [0, 1, -7, 5000])
@pytest.mark.parametrize(
    "moves",
    {
        "device": [(SPAN, [], np.arange(33), np.arange(50, 83))],
        "host": [([], SPAN, np.arange(33), np.arange(50, 83))],
        "both": [(np.arange(5), SPAN, np.arange(38), np.arange(50, 88))],
        "holes": [(np.arange(5), SPAN, [0, 2, 3, 4, 5, 7, 9, 20, 21, 37], np.arange(50, 60))],
        "scattered": [([3, 9, 4], SPAN[::-2], np.arange(9), [70, 50, 60, 61, 62, 90, 89, 51, 52])],
        "one page": [([], np.arange(32, 48), np.arange(16), np.arange(48, 64))],
        "nothing on the device": [([1, 2], [4, 5], [2, 3], [60, 61])],
    }.items(),
    ids=lambda each: each[0],
)
def test_implementations_agree(memory: Memory, moves: tuple[str, list[Any]], delta: int) -> None:
    memory.compare([move(*each, delta) for each in moves[1]])


def test_moves_of_several_chunks_are_one_launch(memory: Memory, monkeypatch: Any) -> None:
    launches: list[int] = []
    kernels = memory.device._rotate
    rotate_tokens = kernels.rotate_tokens

    def counted(slab: object, moves: Any, *args: Any, **kw: Any) -> None:
        launches.append(len(moves.segments))
        rotate_tokens(slab, moves, *args, **kw)

    monkeypatch.setattr(kernels, "rotate_tokens", counted)
    moves = [
        move([0, 1, 2], [], [0, 2], [50, 51], 3),
        move([4, 5], [7, 8, 9], [1, 2, 4], [60, 61, 63], -4),
        move([], [20, 21], [0, 1], [70, 71], 0),  # copied only
        move([4, 5], [7, 8, 9], [0, 3], [81, 80], 900),
    ]
    memory.compare(moves)
    assert launches == [2 + 3 + 2]
    memory.compare([moves[2]])
    assert len(launches) == 1


@given(
    page=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    head_dim=st.sampled_from([16, 64, 80]),
    interleaved=st.booleans(),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None, phases=[Phase.reuse, Phase.generate])
def test_implementations_agree_on_random_moves(
    page: int, dtype: str, head_dim: int, interleaved: bool, random: Random
) -> None:
    memory = Memory(page, dtype, head_dim, interleaved=interleaved)
    with memory.engine:
        free = list(range(TOKENS // 2, TOKENS))
        moves = []
        for _ in range(random.randint(1, 4)):
            begin, end = sorted(random.sample(range(TOKENS // 2 + 1), 2))
            slots = np.arange(begin, end)
            if random.random() < 0.3:
                slots = np.array(random.sample(range(TOKENS // 2), random.randint(0, 9)), np.int64)
            first, last = sorted(random.sample(range(PAGES * 16 + 1), 2))
            places = np.arange(first, last)[: random.choice([0, 20, 96])]
            count = min(len(slots) + len(places), len(free), random.randint(1, 20))
            if not count:
                continue
            offsets = sorted(random.sample(range(len(slots) + len(places)), count))
            if random.random() < 0.5:
                offsets = list(range(count))
            at = random.randint(0, len(free) - count)
            targets, free[at : at + count] = free[at : at + count], []
            delta = random.choice([0, 1, random.randint(-9000, 9000)])
            moves.append(move(slots, places, offsets, targets, delta))
        if moves:
            memory.compare(moves)


@pytest.mark.parametrize("name", ["plain", "half", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernel_for_devices_is_verified_against_the_model(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_ext.engine.chunks.rope.moves_of", DeviceMoves)
    embedding = tables()[name]
    layout = Layout(16, 2, 3, embedding.head_size, dtype, "f")
    model = type("LlamaForCausalLM", (torch.nn.Module,), {})()
    model.embedding = embedding
    right = verified_rope(model, layout)
    wrong = type(right)(right.rotary_dim, right.frequencies[::-1], right.interleaved)
    monkeypatch.setattr("sgl_ext.engine.kv.rope.rope_of", lambda _: wrong)
    with pytest.raises(ActivationError, match="keys moved from position 0 to 1 differ by"):
        verified_rope(model, layout)


ON_DEVICE = """
import numpy as np
import torch
from faked_cuda import journal
from sgl_ext.memory.rope import Rope
from sgl_ext.engine.chunks.moves import DeviceMoves, HostMoves, Move, moves_of
from sgl_ext.memory.slab import Layout

class Holds:
    def fill_tokens(self, places, slots):
        assert (places.tolist(), slots.tolist()) == ([41, 42], [15, 16])

layout = Layout(4, 2, 2, 16, "float32", "f")
slab = torch.ones(5, 4, 2, 2, 2, 16, device="cuda")
rope = Rope(16, tuple(10_000.0 ** -(np.arange(8) / 8)))
moves = moves_of(layout, rope, slab, Holds())
assert type(moves) is DeviceMoves
assert type(moves_of(layout, rope, torch.ones(5, 4, 2, 2, 2, 16))) is HostMoves
slots, stream = torch.arange(3, device="cuda"), torch.cuda.Stream()
with torch.cuda.stream(stream):
    moves([Move(slots, np.arange(40, 44), np.array([0, 2, 4, 5]), np.arange(13, 17), 7)])
journal.write("sync", "end")
changed = (slab != 1).flatten(1).any(1).tolist()
assert changed == [False, False, False, True, True], changed
"""


def test_moves_on_a_device_wait_for_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_DEVICE],
        env={**os.environ, **environment(tmp_path, tmp_path / "journal")},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = next(lines(tmp_path / "journal"))
    assert (first["kind"], first["what"]) == ("sync", "end")


def test_the_cpu_needs_no_triton() -> None:
    program = """
import sys, torch
from sgl_ext.memory.rope import Rope
from sgl_ext.engine.chunks.moves import moves_of
from sgl_ext.memory.slab import Layout
moves_of(Layout(1, 1, 1, 16, "float32", "f"), Rope(16, (0.5,) * 8), torch.ones(2, 1, 1, 2, 1, 16))
print({"triton", "sgl_ext_kernels"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "set()"
