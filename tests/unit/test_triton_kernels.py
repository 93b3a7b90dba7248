"""Triton kernels under Triton's interpreter, and compiled for a GPU that need not be present.

Interpretation is decided when a kernel is defined. The tests therefore import private copies of the
kernel package, so that nothing else in this process sees an interpreted kernel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kernels" / "triton"
CPU = torch.device("cpu")


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_kernels(name: str, *, interpret: bool) -> ModuleType:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        return load(SOURCES / "sgl_ext_kernels" / "__init__.py", name)


checks = load(SOURCES / "checks.py", "triton_kernel_checks")
kernels = load_kernels("interpreted_kernels", interpret=True)
compiled = load_kernels("compiled_kernels", interpret=False)


@pytest.fixture(autouse=True)
def shipped_tile() -> Iterator[None]:
    tile = kernels.copy_rows.TILE_BYTES
    yield
    kernels.copy_rows.TILE_BYTES = tile


@given(random=st.randoms(use_true_random=False))
# No shrinking: it takes minutes under the interpreter, and a failure names a small slab anyway.
@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_kernels_match_their_references_in_all_memory(random: Random) -> None:
    checks.check(kernels, checks.Case.random(random), random, CPU)


@pytest.mark.parametrize("word", [1, 8])
def test_kernels_reach_words_beyond_2_to_the_31(word: int, tmp_path: Path) -> None:
    # A sparse file: only the pages that are touched exist.
    memory = torch.from_file(
        str(tmp_path / "slab"), shared=True, size=checks.far_bytes(word), dtype=torch.uint8
    )
    checks.check_far(kernels, memory, word)


def slab_of(*shape: int) -> torch.Tensor:
    """Returns a slab in which every element is its own flat index."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_gathers_return_the_expected_elements() -> None:
    slab = slab_of(5, 2, 3, 2, 1, 2)
    groups = torch.empty(3, 2, 3, 2, 1, 2)
    kernels.gather_groups(slab, kernels.Runs(torch.tensor([3, 0]), torch.tensor([2, 1])), groups)
    assert groups[:, 0, 0, 0, 0, 0].tolist() == [72, 96, 0]
    layer = torch.empty(2, 2, 2, 1, 2)
    kernels.gather_layer(slab, torch.tensor([1, 4]), 2, layer)
    # Block 1 begins at 24, a token has 12 elements, and layer 2 begins 8 elements into a token.
    assert layer.flatten(2).tolist()[0] == [[32, 33, 34, 35], [44, 45, 46, 47]]
    tokens = torch.empty(2, 3, 2, 1, 2)
    kernels.gather_tokens(slab, torch.tensor([9, 2]), tokens)
    assert tokens.flatten(1).tolist() == [list(range(108, 120)), list(range(24, 36))]


def test_scatter_restores_gathered_groups() -> None:
    slab = slab_of(6, 4, 2, 2, 3, 8)
    before = slab.clone()
    runs = kernels.Runs(torch.tensor([4, 1]), torch.tensor([2, 2]))
    staging = torch.empty(4, 4, 2, 2, 3, 8)
    kernels.gather_groups(slab, runs, staging)
    slab[[4, 5, 1, 2]] = -1
    kernels.scatter_groups(staging, slab, runs)
    assert torch.equal(slab, before)


def test_gather_from_storage_that_begins_at_an_odd_address() -> None:
    """Gathers from a slab at an aligned address, whose storage offset is therefore odd.

    Memory that another library has mapped may begin at an odd address.
    """
    memory = torch.frombuffer(bytearray(range(256)), dtype=torch.uint8, offset=1)
    slab = memory[7 : 7 + 4 * 2 * 1 * 2 * 1 * 8].view(4, 2, 1, 2, 1, 8)
    out = torch.empty(1, 2, 1, 2, 1, 8, dtype=torch.uint8)
    kernels.gather_groups(slab, (torch.tensor([2]), torch.tensor([1])), out)
    assert out.flatten().tolist() == list(range(72, 104))


def test_checked_rows_do_not_change_with_their_tensor() -> None:
    slab, blocks = slab_of(4, 1, 1, 2, 1, 2), torch.tensor([2, 1])
    rows = kernels.check_blocks(slab, blocks)
    blocks[0] = 99
    out = torch.empty(2, 1, 2, 1, 2)
    kernels.gather_layer(slab, rows, 0, out)
    assert out[:, 0, 0, 0, 0].tolist() == [8, 4]


def long(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


BAD_NUMBERS = {
    "block behind the end": (long(1, 4), IndexError, "asked for block 4, .* blocks 0 to 3"),
    "negative block": (long(-1), IndexError, "asked for block -1, .* blocks 0 to 3"),
    "int32": (long(1).int(), TypeError, "blocks: found torch.int32, expected torch.int64"),
    "two dimensions": (long(1).view(1, 1), ValueError, r"blocks: found shape \[1, 1\]"),
}


@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_invalid_block_numbers_raise_and_move_nothing(bad: str) -> None:
    blocks, error, message = BAD_NUMBERS[bad]
    slab = slab_of(4, 2, 3, 2, 1, 4)
    out = torch.full((blocks.numel(), 2, 2, 1, 4), -1.0)
    with pytest.raises(error, match=message):
        kernels.gather_layer(slab, blocks, 0, out)
    assert (out == -1).all()
    with pytest.raises(error, match=message):
        kernels.scatter_layer(out, slab, blocks, 0)
    assert torch.equal(slab, slab_of(4, 2, 3, 2, 1, 4))


BIG = 2**63 - 1
BAD_RUNS = {
    "over the end": (long(0, 3), long(1, 2), IndexError, "run 1 asked for 2 blocks from block 3"),
    "negative start": (long(-1), long(1), IndexError, "run 0 .* block -1, .* blocks 0 to 3"),
    "empty run": (long(2), long(0), IndexError, "run 0 asked for 0 blocks"),
    "negative length": (long(2), long(-BIG), IndexError, f"run 0 asked for -{BIG} blocks"),
    "sum that overflows": (long(BIG), long(1), IndexError, f"run 0 .* block {BIG}"),
    "length that overflows": (long(1), long(BIG), IndexError, f"run 0 asked for {BIG} blocks"),
    "unequal": (long(0, 1), long(1), ValueError, "2 starts and 1 lengths"),
    "float": (long(0).float(), long(1), TypeError, "runs.start: found torch.float32"),
}


@pytest.mark.parametrize("bad", BAD_RUNS)
def test_invalid_runs_raise_and_move_nothing(bad: str) -> None:
    start, blocks, error, message = BAD_RUNS[bad]
    slab = slab_of(4, 2, 3, 2, 1, 4)
    with pytest.raises(error, match=message):
        kernels.gather_groups(slab, (start, blocks), torch.empty(1, 2, 3, 2, 1, 4))
    with pytest.raises(error, match=message):
        kernels.scatter_groups(torch.empty(1, 2, 3, 2, 1, 4), slab, (start, blocks))
    assert torch.equal(slab, slab_of(4, 2, 3, 2, 1, 4))


def test_scatter_to_the_same_place_twice_is_refused() -> None:
    slab = slab_of(4, 2, 3, 2, 1, 4)
    with pytest.raises(IndexError, match="asked to scatter to block 2 twice"):
        kernels.scatter_groups(torch.empty(4, 192), slab, (long(1, 2), long(2, 2)))
    with pytest.raises(IndexError, match="asked to scatter to slot 5 twice"):
        kernels.scatter_tokens(torch.empty(3, 3, 2, 1, 4), slab, long(5, 0, 5))
    with pytest.raises(ValueError, match="not checked for being distinct"):
        kernels.scatter_layer(
            torch.empty(1, 2, 2, 1, 4), slab, kernels.check_blocks(slab, long(1)), 0
        )
    assert torch.equal(slab, slab_of(4, 2, 3, 2, 1, 4))


def test_rows_checked_for_another_slab_or_kind_are_refused() -> None:
    slab, larger = slab_of(4, 2, 3, 2, 1, 4), slab_of(5, 2, 3, 2, 1, 4)
    out = torch.empty(1, 2, 2, 1, 4)
    with pytest.raises(ValueError, match=r"asked for blocks of a slab of 4 .* as blocks of 5"):
        kernels.gather_layer(slab, kernels.check_blocks(larger, long(4)), 0, out)
    with pytest.raises(ValueError, match=r"asked for blocks of a slab of 4 .* as slots of 8"):
        kernels.gather_layer(slab, kernels.check_slots(slab, long(4)), 0, out)


BAD_TENSORS = {
    "too small": ({"out": torch.empty(1, 2, 2, 1, 4)}, r"found torch.float32 \[1, 2, 2, 1, 4\]"),
    "too large": (
        {"out": torch.empty(3, 2, 2, 1, 4)},
        r"expected torch.float32 \[2, 2, 2, 1, 4\] or torch.uint8 \[2, 64\]",
    ),
    "dtype": ({"out": torch.empty(2, 2, 2, 1, 4).half()}, "found torch.float16"),
    "strided": (
        {"out": torch.empty(2, 2, 2, 1, 8)[..., :4]},
        r"strides \[32, 16, 8, 8, 1\], expected a contiguous",
    ),
    "device": (
        {"out": torch.empty(2, 2, 2, 1, 4, device="meta")},
        "found on meta, expected on cpu",
    ),
    "slab of five": ({"slab": torch.empty(4, 2, 3, 2, 4)}, r"slab: found shape \[4, 2, 3, 2, 4\]"),
    "slab without V": ({"slab": torch.empty(4, 2, 3, 1, 1, 4)}, "slab: found shape"),
    "hollow slab": ({"slab": torch.empty(4, 2, 3, 2, 1, 0)}, "whose blocks hold nothing"),
    "slab of other layout": (
        {"slab": torch.empty(4, 3, 2, 2, 1, 4).transpose(1, 2)},
        "slab: .* expected a contiguous",
    ),
}


@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_invalid_tensors_are_refused(bad: str) -> None:
    given, message = BAD_TENSORS[bad]
    tensors: dict[str, torch.Tensor] = {
        "slab": slab_of(4, 2, 3, 2, 1, 4),
        "out": torch.empty(2, 2, 2, 1, 4),
        **given,
    }
    with pytest.raises(ValueError, match=message):
        kernels.gather_layer(tensors["slab"], long(0, 1), 1, tensors["out"])
    with pytest.raises(ValueError, match=message):
        kernels.scatter_layer(tensors["out"], tensors["slab"], long(0, 1), 1)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_out_of_range_is_refused(layer: int) -> None:
    with pytest.raises(IndexError, match=f"asked for layer {layer}, .* layers 0 to 2"):
        kernels.gather_layer(slab_of(4, 2, 3, 2, 1, 4), long(0), layer, torch.empty(1, 2, 2, 1, 4))


def test_staging_inside_the_slab_is_refused() -> None:
    slab = slab_of(4, 2, 3, 2, 1, 4)
    with pytest.raises(ValueError, match="inside the slab's own memory"):
        kernels.gather_groups(slab, (long(0), long(1)), slab[3:])


def test_compiled_kernels_on_cpu_tensors_name_the_alternatives() -> None:
    slab = slab_of(4, 2, 3, 2, 1, 4)
    with pytest.raises(
        RuntimeError, match=r"sgl_ext_kernels\.reference, or set TRITON_INTERPRET=1"
    ):
        compiled.gather_groups(slab, (long(0), long(1)), torch.empty(1, 2, 3, 2, 1, 4))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("operation", ["groups", "layer", "tokens"])
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_compiled_kernels_move_16_bytes_per_access(
    operation: str, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiles the launcher's kernel for an H200 with SmolLM2's geometry, and does not run it."""
    launched: dict[str, Any] = {}

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *tensors, **sizes: launched.update(tensors=tensors, sizes=sizes)

    kernel = compiled.copy_rows._copy_rows
    monkeypatch.setattr(compiled.copy_rows, "_copy_rows", Recorder())
    slab = torch.empty(4, 16, 30, 2, 3, 64, dtype=torch.bfloat16)
    numbers: Any = (long(1), long(2)) if operation == "groups" else long(1, 2)
    staging = {
        "groups": slab[:2],
        "layer": slab[:2, :, 0],
        "tokens": slab[0, :2],
    }[operation]
    chosen = next(one for one in checks.OPERATIONS if one.name == operation)
    checks.perform(
        compiled,
        chosen,
        way == "scatter",
        slab,
        numbers,
        7,
        torch.empty_like(staging, memory_format=torch.contiguous_format),
    )
    assert [tensor.dtype for tensor in launched["tensors"]] == [torch.int64] * 3
    options = {"num_warps": launched["sizes"].pop("num_warps")}
    pointers = dict.fromkeys(("packed", "strided", "rows"), "*i64")
    source = ASTSource(
        kernel,
        pointers | dict.fromkeys(launched["sizes"], "constexpr"),
        launched["sizes"],
        {(index,): [["tt.divisibility", 16]] for index in range(3)},
    )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    moves = re.findall(r"(?:ld|st)\.global[.\w]*", ptx)
    # One load reads a row number; the others move pairs of 8-byte words, four in flight per thread.
    assert sorted(moves) == ["ld.global.b64"] + ["ld.global.v2.b64"] * 4 + ["st.global.v2.b64"] * 4


def gpu_check(*arguments: str, python_path: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": python_path,
    }
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_gpu_check_reports_a_missing_gpu_in_one_line() -> None:
    result = gpu_check()
    assert (result.returncode, result.stderr) == (3, "")
    assert result.stdout == "gpu_check: no GPU that torch can use; nothing was checked\n"


def test_gpu_check_needs_only_torch_and_triton(tmp_path: Path) -> None:
    for package in ("sglang", "pydantic", "sgl_ext", "pytest", "hypothesis"):
        (tmp_path / f"{package}.py").write_text(f"raise AssertionError('imports {package}')")
    result = gpu_check("--interpret", "--cases", "1", python_path=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("gpu_check: 3 of 3 checks passed\n")
