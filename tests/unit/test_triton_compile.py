"""Triton kernels of a GPU's path, compiled for GPUs that need not be present.

Ours, and those of SGLang's Triton attention backend over views of the slab. Launches are recorded
on tensors with the strides of real models, specialized as Triton's JIT specializes them, and
compiled to machine code. SGLang's attention also runs interpreted on offsets beyond 2**31.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import triton
from test_triton_kernels import checks, compiled, long
from test_triton_log_sums import compiled as log_sums
from test_triton_rotate import compiled as rotate
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


class Model(NamedTuple):
    """Geometry of a model's attention."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sinks: bool = False

    def views(self, page: int, blocks: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the last layer in a slab, ``[slots, kv_heads, head_dim]``."""
        slab = self.slab(page, blocks, device).flatten(0, 1)
        return slab[:, -1, 0], slab[:, -1, 1]

    def slab(self, page: int, blocks: int, device: str) -> torch.Tensor:
        shape = (blocks, page, self.layers, 2, self.kv_heads, self.head_dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=device)


MODELS = {
    "Llama-8B": Model(32, 32, 8, 128),
    "Qwen3-32B": Model(64, 64, 8, 128),
    "GPT-OSS": Model(36, 64, 8, 64, sinks=True),
}
CAPABILITIES = [80, 90, 100]
PAGES = [1, 16]

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Kernel, positional arguments and keyword arguments."""


@contextmanager
def recorded(module: ModuleType, *names: str) -> Iterator[list[Launch]]:
    """Replaces kernels of a module by recorders of their launches, which launch nothing."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *args, **kw: launches.append((self.kernel, args, kw))

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(module, name, Recorder(getattr(module, name)))
        yield launches


class Compiler:
    """Compiles launches; equal specializations are compiled once."""

    def __init__(self) -> None:
        self._found: dict[str, Mapping[str, Any]] = {}

    def __call__(self, launch: Launch, capability: int) -> Mapping[str, Any]:
        """Returns the intermediate forms of a kernel and its ``cubin`` by name."""
        kernel, args, kw = launch
        assert isinstance(kernel, triton.runtime.JITFunction)
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, **kw)
        # The name of an option that is passed by keyword may also be a parameter's.
        options, signature, constants, attributes = kernel._pack_args(
            backend, options, bound, specialization, options
        )
        key = repr((kernel.__name__, signature, constants, attributes, options, target))
        if key not in self._found:
            source = ASTSource(kernel, signature, constants, attributes)
            made = triton.compile(source, target=target, options=options.__dict__)
            self._found[key] = made.asm
        return self._found[key]


@pytest.fixture(scope="module")
def compile_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("cache"))
        yield Compiler()


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(params=CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def attention(capability: int, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's module of extend attention, with the tiles that it chooses on a GPU."""
    from sglang.kernels.ops.attention import extend_attention

    monkeypatch.setattr(extend_attention, "_is_cuda", True)
    monkeypatch.setattr(extend_attention, "CUDA_CAPABILITY", divmod(capability, 10), raising=False)
    return extend_attention


def machine_code(asm: Mapping[str, Any], capability: int) -> None:
    """Asserts that a kernel was compiled for the capability and assembled."""
    assert re.search(rf"^\.target sm_{capability}", asm["ptx"], re.MULTILINE)
    assert asm["cubin"][:4] == b"\x7fELF"


def wide_offsets(asm: Mapping[str, Any]) -> None:
    """Asserts that every element of K and V is addressed by a 64-bit offset."""
    places = r"tt\.addptr .*: tensor<[\dx]+!tt\.ptr<bf16>>, tensor<[\dx]+(i\d+)>"
    assert {*re.findall(places, asm["ttir"])} == {"i64"}


@pytest.mark.parametrize("page", PAGES)
def test_extend_attention(
    page: int, model: Model, capability: int, attention: ModuleType, compile_: Compiler
) -> None:
    keys, values = model.views(page, 1_000_000 // page, "meta")
    new = [torch.empty(9, heads, model.head_dim, dtype=torch.bfloat16, device="meta")
           for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads)]  # fmt: skip
    pointers = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
    with recorded(attention, "_fwd_kernel") as launches:
        attention.extend_attention_fwd(
            *new, keys, values, *pointers, torch.empty(64, dtype=torch.int64), None, True, None,
            7, 1.0, 1.0, model.head_dim**-0.5, sinks=sinks(model), page_size=page,
        )  # fmt: skip
    (launch,) = launches
    asm = compile_(launch, capability)
    machine_code(asm, capability)
    wide_offsets(asm)


@pytest.mark.parametrize("page", PAGES)
def test_decode_attention(page: int, model: Model, capability: int, compile_: Compiler) -> None:
    from sglang.kernels.ops.attention import decode_attention

    keys, values = model.views(page, 1_000_000 // page, "meta")
    query = torch.empty(4, model.heads, model.head_dim, dtype=torch.bfloat16, device="meta")
    partial = torch.empty(4, model.heads, 8, model.head_dim, device="meta")
    pointers = torch.empty(5, dtype=torch.int32), torch.empty(64, dtype=torch.int64)
    with recorded(decode_attention, "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2") as launches:
        decode_attention.decode_attention_fwd(
            query, keys, values, torch.empty_like(query), *pointers, partial, partial[..., 0],
            torch.empty(4, dtype=torch.int32), 8, model.head_dim**-0.5, 1.0, 1.0,
            sinks=sinks(model), page_size=page,
        )  # fmt: skip
    first, second = (compile_(launch, capability) for launch in launches)
    wide_offsets(first)
    for asm in (first, second):
        machine_code(asm, capability)


def sinks(model: Model) -> torch.Tensor | None:
    return torch.empty(model.heads, dtype=torch.bfloat16) if model.sinks else None


def test_metadata_of_attention(capability: int, compile_: Compiler) -> None:
    """Compiles the kernels that list a batch's slots and choose the splits of its requests."""
    from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    small, wide = torch.empty(8, dtype=torch.int32), torch.empty(8, dtype=torch.int64)
    table = torch.empty(8, 131_076, dtype=torch.int32, device="meta")
    lists: Launch = (
        create_flashinfer_kv_indices_triton,
        (table, wide, wide, small, None, wide, table.stride(0)), {},
    )  # fmt: skip
    splits: Launch = (
        get_num_kv_splits_triton, (small, wide, 4, 1, 32, 8, 8, 132), {"MAX_NUM_SEQ": 256},
    )  # fmt: skip
    for launch in (lists, splits):
        machine_code(compile_(launch, capability), capability)


@pytest.mark.parametrize("page", PAGES)
def test_copies_of_kv(page: int, model: Model, capability: int, compile_: Compiler) -> None:
    """Compiles our gathers and scatters of block groups, layers and tokens."""
    slab = model.slab(page, 4, "cpu")
    for operation in checks.OPERATIONS:
        numbers: Any = (long(1), long(2)) if operation.name == "groups" else long(1, 2)
        staging = torch.empty(2, *operation.item(tuple(slab.shape)), dtype=slab.dtype)
        for scatter in (False, True):
            with recorded(compiled.copy_rows, "_copy_rows") as launches:
                checks.perform(compiled, operation, scatter, slab, numbers, 7, staging)
            (launch,) = launches
            machine_code(compile_(launch, capability), capability)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_keys(
    interleaved: bool, model: Model, capability: int, compile_: Compiler
) -> None:
    slab = model.slab(1, 8, "cpu")
    with recorded(rotate, "_rotate_heads") as launches:
        rotate.rotate_tokens(
            slab, rotate.check_moves(slab, long(1, 2), long(0, 3)),
            *checks.angles_of([5], model.head_dim // 2), interleaved=interleaved,
        )  # fmt: skip
    (launch,) = launches
    machine_code(compile_(launch, capability), capability)


@pytest.mark.parametrize("page", PAGES)
def test_log_sums_of_logits(page: int, model: Model, capability: int, compile_: Compiler) -> None:
    keys, _ = model.views(page, 1_000_000 // page, "meta")
    query = torch.empty(4, model.heads, model.head_dim, dtype=torch.bfloat16, device="meta")
    table = torch.empty(8, 131_076, dtype=torch.int32, device="meta")
    where = torch.empty(2, 4, dtype=torch.int64, device="meta")
    with recorded(log_sums, "_log_sums") as launches:
        log_sums.log_sums(query, keys, table, *where, model.head_dim**-0.5)
    (launch,) = launches
    asm = compile_(launch, capability)
    machine_code(asm, capability)
    wide_offsets(asm)


def test_attention_reads_elements_beyond_2_to_the_31(tmp_path: Path) -> None:
    """Runs SGLang's kernels in a process whose interpreter is on before it imports Triton."""
    program = Path(__file__).with_name("far_attention_kit.py")
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "slab")],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines() == ["extend 1", "decode 1", "extend 16", "decode 16"]
