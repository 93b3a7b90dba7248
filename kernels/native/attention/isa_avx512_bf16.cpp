// AVX-512 BF16 kernels: 16 lanes; vdpbf16ps accumulates the products of bf16 pairs in fp32.
#include "avx512_bf16.inl"
#include "kernels.inl"

namespace sgl_ext::attention {
const Kernels avx512_dot_bf16 = kernels<DotProduct>;
}  // namespace sgl_ext::attention
