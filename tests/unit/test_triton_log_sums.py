"""Triton kernel for the log-sum-exp of logits, against its reference and the definition.

It runs in Triton's interpreter; :mod:`test_triton_compile` compiles it for GPUs.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_triton_kernels import load_kernels

load_kernels("compiled_log_sums", interpret=False)
compiled = importlib.import_module("compiled_log_sums.log_sums")


def test_sums_are_those_of_the_reference_and_the_definition(tmp_path: Path) -> None:
    """Runs the kernel in a process whose interpreter is on before it imports Triton."""
    program = Path(__file__).with_name("log_sums_kit.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path / "slab")],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines() == ["definition", "random", "far"]


QUERY, KEYS = torch.zeros(2, 4, 16), torch.zeros(9, 2, 16)
TABLE, LINES = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
BAD = {
    "heads": ((QUERY[:, :3], KEYS, TABLE, LINES, LINES), "a multiple of kv_heads"),
    "head_dim": ((QUERY[..., :8], KEYS, TABLE, LINES, LINES), r"queries \[2, 4, 8\] over keys"),
    "dtype": ((QUERY, KEYS.half(), TABLE, LINES, LINES), "over keys of torch.float16"),
    "strides": ((QUERY, KEYS.mT.contiguous().mT, TABLE, LINES, LINES), "expected contiguous heads"),
    "table": ((QUERY, KEYS, TABLE.long(), LINES, LINES), "table: found torch.int64"),
    "requests": ((QUERY, KEYS, TABLE, LINES[:1], LINES), r"requests: found torch.int64 \[1\]"),
    "lengths": ((QUERY, KEYS, TABLE, LINES, LINES.int()), "lengths: found torch.int32"),
    "device": ((QUERY, KEYS.to("meta"), TABLE, LINES, LINES), "expected one device"),
}


@pytest.mark.parametrize("bad", BAD)
def test_invalid_tensors_are_refused(bad: str) -> None:
    tensors, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        compiled.log_sums(*tensors, 1.0)


def test_a_compiled_kernel_on_cpu_tensors_names_the_alternatives() -> None:
    with pytest.raises(RuntimeError, match=r"sgl_ext_kernels\.log_sums\.reference, or set TRITON"):
        compiled.log_sums(QUERY, KEYS, TABLE, LINES, LINES, 1.0)
