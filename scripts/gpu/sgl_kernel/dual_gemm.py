"""Stand-in for SGLang's module of dual matrix products, which imports CUTLASS at its top.

SGLang 0.5.23 imports that module whenever it builds a Llama or Qwen on CUDA, and calls it on
Blackwell only. Without CUTLASS no such model would start.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from importlib.util import find_spec

_NAME = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"
MAX_DUAL_GEMM_DECODE_TOKENS = 16


class DualGemmQuantMode(IntEnum):
    """Quantization of the activation."""

    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4


def can_use_dual_gemm(*_shapes: object) -> bool:
    """Returns False: SGLang then multiplies twice."""
    return False


def install() -> None:
    """Puts this module in the place of SGLang's, unless CUTLASS is installed."""
    if find_spec("cutlass") is None:
        sys.modules.setdefault(_NAME, sys.modules[__name__])
