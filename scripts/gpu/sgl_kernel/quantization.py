"""Kernels of GGUF weights, which this stand-in does not have."""

from sgl_kernel.missing import missing

ggml_dequantize = missing("quantization.ggml_dequantize", "GGUF weights")
ggml_moe_a8 = missing("quantization.ggml_moe_a8", "GGUF weights")
ggml_moe_a8_vec = missing("quantization.ggml_moe_a8_vec", "GGUF weights")
ggml_moe_get_block_size = missing("quantization.ggml_moe_get_block_size", "GGUF weights")
ggml_mul_mat_a8 = missing("quantization.ggml_mul_mat_a8", "GGUF weights")
ggml_mul_mat_vec_a8 = missing("quantization.ggml_mul_mat_vec_a8", "GGUF weights")
