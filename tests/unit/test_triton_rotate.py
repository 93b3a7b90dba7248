"""Triton kernel that copies tokens and rotates their keys.

The interpreted kernel is compared with its reference, the native copy and the definition. The
kernel is also compiled for GPUs, which need not be present.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_triton_kernels import CPU, checks, load_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_ext.chunks.rotation import RotatingCopy
from sgl_ext.memory.rope import Rope
from sgl_ext.memory.slab import DTYPES, Layout


def load_rotate(name: str, *, interpret: bool) -> ModuleType:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        load_kernels(name, interpret=interpret)
        return importlib.import_module(f"{name}.rotate")


rotate = load_rotate("interpreted_rotate", interpret=True)
compiled = load_rotate("compiled_rotate", interpret=False)
kernels = importlib.import_module("interpreted_rotate")

HEADS = [(48, 48), (48, 24), (64, 64), (64, 16), (128, 128), (128, 64)]
"""Pairs of ``head_dim`` and ``rotary_dim``."""


def slab_of(head_dim: int, dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, 3, 2, 3, head_dim, generator=generator).to(getattr(torch, dtype))


def long(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


SOURCES, TARGETS = long(3, 17, 4, 3, 11), long(0, 19, 6, 8, 2)
SEGMENTS = torch.tensor([0, 2, 1, 2, 0], dtype=torch.int32)
DELTAS = [7, -1234, 100_003]


@given(random=st.randoms(use_true_random=False))
# No shrinking: in the interpreter it takes minutes, and the slab of a failure is small anyway.
@settings(max_examples=20, deadline=None, phases=[Phase.reuse, Phase.generate])
def test_all_memory_matches_the_reference(random: Random) -> None:
    checks.check_rotation(kernels, checks.Case.random_rotation(random), random, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_bytes", [64, 8192])
def test_memory_matches_the_reference_with_the_geometry_of_a_model(
    dtype: str, tile_bytes: int
) -> None:
    """Uses SmolLM2's 90 heads of keys; the last program of a token may have fewer than others."""
    case = checks.Case((3, 16, 30, 2, 3, 64), getattr(torch, dtype), 0, tile_bytes, 0)
    chance = Random(tile_bytes)  # noqa: S311
    checks.check_rotation(kernels, case, chance, CPU)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_result_matches_the_native_copy_bit_for_bit(
    dtype: str, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    frequencies = 10_000.0 ** -(np.arange(rotary_dim // 2) / (rotary_dim // 2))
    ours = slab_of(head_dim, dtype)
    # A model does not cache such numbers, but their bits must match, too.
    ours[..., 1], ours[..., 3] = 0.0, -0.0
    tokens = ours.flatten(0, 1)
    tokens[4, 0] *= 2.0**-130
    tokens[11, 0, 0, 0].view(torch.int16)[1] = -1  # a NaN with a sign, in either dtype
    theirs = ours.clone()
    angles = np.array(DELTAS)[:, None] * frequencies
    tables = (torch.from_numpy(wave(angles).astype(np.float32)) for wave in (np.cos, np.sin))
    moves = rotate.check_moves(ours, SOURCES, TARGETS, SEGMENTS)
    rotate.rotate_tokens(ours, moves, *tables, interleaved=interleaved)

    layout = Layout(4, 3, 3, head_dim, dtype, "f")
    copy = RotatingCopy(layout, Rope(rotary_dim, tuple(frequencies), interleaved))
    size = layout.token_bytes
    for segment, delta in enumerate(DELTAS):
        runs = [
            (theirs.data_ptr() + source * size, theirs.data_ptr() + target * size, 1, size, size)
            for source, target, its in zip(SOURCES, TARGETS, SEGMENTS, strict=True)
            if its == segment
        ]
        copy(np.array(runs, np.int64), delta)
    checks.assert_same("the slab", ours, theirs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_are_rotated_as_complex_numbers(
    dtype: str, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    slab, pairs = slab_of(head_dim, dtype), rotary_dim // 2
    before = slab.flatten(0, 1).double()
    moves = rotate.check_moves(slab, SOURCES, TARGETS, SEGMENTS)
    rotate.rotate_tokens(slab, moves, *checks.angles_of(DELTAS, pairs), interleaved=interleaved)
    for source, target, segment in zip(SOURCES, TARGETS, SEGMENTS, strict=True):
        expected, found = before[source].clone(), slab.flatten(0, 1)[target]
        keys = expected[:, 0, :, :rotary_dim]
        a, b = (keys[..., ::2], keys[..., 1::2]) if interleaved else keys.chunk(2, -1)
        angles = DELTAS[segment] * 10_000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
        order = (pairs, 2) if interleaved else (2, pairs)
        parts = torch.stack((turned.real, turned.imag), -1 if interleaved else -2)
        assert parts.shape[-2:] == order
        expected[:, 0, :, :rotary_dim] = parts.flatten(-2)
        # Half a unit in the last place, plus the error of fp32.
        places = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=places * 1.01, atol=2e-6)
        assert torch.equal(found[:, 1].double(), expected[:, 1])
        assert torch.equal(found[..., rotary_dim:].double(), expected[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_angle_of_zero_is_a_plain_copy(dtype: str, interleaved: bool) -> None:
    slab = slab_of(48, dtype)
    expected = slab.clone()
    expected.flatten(0, 1)[TARGETS] = slab.flatten(0, 1)[SOURCES]
    moves = rotate.check_moves(slab, SOURCES, TARGETS)
    rotate.rotate_tokens(slab, moves, *checks.angles_of([0], 20), interleaved=interleaved)
    checks.assert_same("the slab", slab, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_nan_and_infinity(dtype: str) -> None:
    checks.check_no_numbers(kernels, getattr(torch, dtype), CPU)


def test_offsets_may_exceed_2_to_the_31_elements(tmp_path: Path) -> None:
    # A sparse file: only the pages that are touched take memory.
    memory = torch.from_file(
        str(tmp_path / "slab"), shared=True, size=checks.far_bytes(2), dtype=torch.uint8
    )
    checks.check_far_rotation(kernels, memory)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_in_place_equals_a_rotated_copy(dtype: str, interleaved: bool) -> None:
    slab, angles = slab_of(64, dtype), checks.angles_of(DELTAS, 32)
    copied = slab.clone()
    moves = rotate.check_moves(copied, SOURCES, TARGETS, SEGMENTS)
    rotate.rotate_tokens(copied, moves, *angles, interleaved=interleaved)
    slab.flatten(0, 1)[TARGETS] = slab.flatten(0, 1)[SOURCES]
    moves = rotate.check_moves(slab, TARGETS, TARGETS, SEGMENTS)
    rotate.rotate_tokens(slab, moves, *angles, interleaved=interleaved)
    checks.assert_same("the slab", slab, copied)


def test_moves_copy_their_input_tensors() -> None:
    slab, sources, segments = slab_of(48, "float32"), SOURCES.clone(), SEGMENTS.clone()
    moves = rotate.check_moves(slab, sources, TARGETS, segments)
    sources[:], segments[:] = 99, 99
    assert torch.equal(moves.sources.numbers, SOURCES)
    assert torch.equal(moves.segments, SEGMENTS)
    assert moves.tables == 3


BAD_MOVES: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "source behind the end": ((long(20), long(0)), IndexError, "asked for slot 20, .* 0 to 19"),
    "negative target": ((long(0), long(-1)), IndexError, "asked for slot -1"),
    "target twice": ((long(0, 1), long(5, 5)), IndexError, "scatter to slot 5 twice"),
    "target that is a source": ((long(0, 1), long(1, 2)), IndexError, "move a token to slot 1"),
    "in place and elsewhere": ((long(4, 4), long(4, 5)), IndexError, "move a token to slot 4"),
    "fewer targets": ((long(0, 1), long(2)), ValueError, r"\[2\] sources to \[1\] targets"),
    "fewer segments": ((long(0, 1), long(2, 3), SEGMENTS[:1]), ValueError, r"in \[1\] segments"),
    "int64 segments": ((long(0), long(2), long(0)), TypeError, "found torch.int64"),
    "negative segment": ((long(0), long(2), SEGMENTS[:1] - 1), IndexError, "segment -1"),
    "int32 sources": ((long(0).int(), long(2)), TypeError, "slots: found torch.int32"),
    "two dimensions": ((long(0)[None], long(2)[None]), ValueError, r"found shape \[1, 1\]"),
}


@pytest.mark.parametrize("bad", BAD_MOVES)
def test_invalid_moves_are_refused(bad: str) -> None:
    asked, error, message = BAD_MOVES[bad]
    with pytest.raises(error, match=message):
        rotate.check_moves(slab_of(48, "float32"), *asked)


ROW = torch.ones(1, 20)
BAD_TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "fp64 angles": ({"sines": ROW.double()}, "sines: found torch.float64"),
    "one row for all": ({"cosines": ROW[0]}, r"cosines: found torch.float32 \[20\]"),
    "unequal tables": ({"sines": torch.ones(1, 16)}, r"sines: found torch.float32 \[1, 16\]"),
    "on another device": ({"cosines": ROW.to("meta")}, "on meta, expected .* on cpu"),
    "strided": ({"sines": torch.ones(1, 40)[:, ::2]}, "expected both contiguous"),
    "no pair": ({"cosines": ROW[:, :0], "sines": ROW[:, :0]}, r"found \[1, 0\]"),
    "too many pairs": (
        dict.fromkeys(("cosines", "sines"), torch.ones(1, 25)),
        r"found \[1, 25\], expected at least 1 segments of 1 to 24 pairs",
    ),
    "too few rows": (dict.fromkeys(("cosines", "sines"), ROW[:0]), "at least 1 segments"),
    "bytes": ({"slab": torch.zeros(5, 4, 3, 2, 3, 48, dtype=torch.uint8)}, "found torch.uint8"),
    "slab of five": ({"slab": torch.zeros(20, 3, 2, 3, 48)}, "slab: found shape"),
    "strided slab": ({"slab": torch.zeros(5, 4, 3, 2, 3, 96)[..., ::2]}, "with strides"),
    "other slab": ({"slab": torch.zeros(6, 4, 3, 2, 3, 48)}, "of 24 slots on cpu, found .* 20"),
}


@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_invalid_tensors_are_refused(bad: str) -> None:
    given, message = BAD_TENSORS[bad]
    tensors = {"slab": slab_of(48, "float32"), "cosines": ROW, "sines": ROW, **given}
    before = tensors["slab"].clone()
    moves = rotate.check_moves(slab_of(48, "float32"), SOURCES, TARGETS)
    with pytest.raises(ValueError, match=message):
        rotate.rotate_tokens(tensors["slab"], moves, tensors["cosines"], tensors["sines"])
    assert torch.equal(tensors["slab"], before)


def test_compiled_kernel_refuses_cpu_tensors_and_names_alternatives() -> None:
    slab = slab_of(48, "float32")
    moves = compiled.check_moves(slab, SOURCES, TARGETS)
    with pytest.raises(RuntimeError, match=r"rotate\.reference, or set TRITON_INTERPRET=1"):
        compiled.rotate_tokens(slab, moves, ROW, ROW)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "dtype", "capability"),
    [
        (30, 3, 64, "bfloat16", 80),
        (30, 3, 64, "bfloat16", 90),
        (32, 8, 128, "bfloat16", 90),
        (32, 8, 128, "float16", 90),
    ],
)
def test_ptx_has_16_byte_accesses_and_no_fused_multiply_add(
    layers: int, kv_heads: int, head_dim: int, dtype: str, capability: int, interleaved: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Compiles the kernel with the arguments of the launcher, and does not run it."""
    launched: dict[str, Any] = {}

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *tensors, **sizes: launched.update(tensors=tensors, sizes=sizes)

    kernel = compiled._rotate_heads
    monkeypatch.setattr(compiled, "_rotate_heads", Recorder())
    slab = torch.empty(1, 4, layers, 2, kv_heads, head_dim, dtype=getattr(torch, dtype))
    compiled.rotate_tokens(
        slab,
        compiled.check_moves(slab, long(1, 2), long(0, 3)),
        *checks.angles_of([5], head_dim // 2),
        interleaved=interleaved,
    )
    sizes = launched["sizes"]
    options = {name: sizes.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    types = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int64": "i64"}
    types |= {"int32": "i32"}
    names = ("slab", "sources", "targets", "segments", "cosines", "sines")
    pointers = {
        name: "*" + types[str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in zip(names, launched["tensors"], strict=True)
    }
    source = ASTSource(
        kernel,
        pointers | dict.fromkeys(sizes, "constexpr"),
        sizes,
        {(index,): [["tt.divisibility", 16]] for index in range(len(names))},
    )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        target = GPUTarget("cuda", capability, 32)
        built = triton.compile(source, target=target, options=options).asm
    ptx = built["ptx"]
    # Each thread moves its keys and values in four accesses of 16 bytes, in flight together.
    assert re.findall(r"st\.\w+[.\w]*", ptx) == ["st.global.v4.b32"] * 4
    loads = re.findall(r"ld\.(?!param)\w+[.\w]*", ptx)
    wide = [load for load in loads if load == "ld.global.v4.b32"]
    assert set(loads) - set(wide) == {"ld.global.b64", "ld.global.b32"}  # slots and a segment
    angles = 2 if interleaved else 4  # the pairs of a thread lie in one access or span two
    assert len(wide) == 4 + angles
    assert not re.search(r"\bfma\.", ptx)
    # The threads that store elements have loaded them, so that tokens can be rotated in place.
    by_thread = {
        access: sorted(
            re.findall(rf"tt\.{access} .*: tensor<(\S+tt\.ptr<b?f16>, #\w+)", built["ttgir"])
        )
        for access in ("load", "store")
    }
    assert by_thread["load"] == by_thread["store"]
    assert len(by_thread["load"]) == (2 if interleaved else 3)
