// AVX-512 kernels: 16 fp32 lanes, bf16 is widened to fp32.
#include "avx512.inl"
#include "kernels.inl"

namespace sgl_ext::attention {
const Kernels avx512_bf16 = kernels<WidenedProduct<bf16>>;
const Kernels avx512_fp32 = kernels<WidenedProduct<float>>;
}  // namespace sgl_ext::attention
