"""Stand-in for SGLang's compiled kernels (``sgl_kernel``) in plain torch, on any device.

It lets SGLang serve dense models on a GPU machine that lacks the package ``sglang-kernel``, with
this folder's parent on ``PYTHONPATH``, and on the CPU where CUDA is faked. The names are those that
SGLang 0.5.23 imports when it serves Llama, Qwen2 and Qwen3. What quantized models, mixtures of
experts and HiCache call raises :class:`NotImplementedError`.
"""

from sgl_kernel import dual_gemm
from sgl_kernel.elementwise import (
    fused_add_rmsnorm,
    gelu_and_mul,
    gelu_tanh_and_mul,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    silu_and_mul,
)
from sgl_kernel.missing import missing
from sgl_kernel.sampling import (
    top_k_renorm_prob,
    top_k_renorm_probs,
    top_p_renorm_prob,
    top_p_renorm_probs,
)

dual_gemm.install()

int8_scaled_mm = missing("int8_scaled_mm", "quantized models")
moe_sum = missing("moe_sum", "mixtures of experts")
moe_sum_reduce = missing("moe_sum_reduce", "mixtures of experts")

__all__ = [
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "int8_scaled_mm",
    "moe_sum",
    "moe_sum_reduce",
    "rmsnorm",
    "silu_and_mul",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
]
