// AVX2 kernels: 8 fp32 lanes.
#include <immintrin.h>

#include "kernels.h"

namespace {

constexpr int kWidth = 8;
constexpr int kGemmRows = 6;
constexpr int kGemmVectors = 2;
constexpr int kHeadBlock = 2;

using vf = __m256;

struct bf16 {
  std::uint16_t bits;
};

inline vf splat(float x) { return _mm256_set1_ps(x); }
inline vf load(const float *p) { return _mm256_loadu_ps(p); }
inline vf load(const bf16 *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void store(float *p, vf v) { _mm256_storeu_ps(p, v); }
inline void store(bf16 *p, vf v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  rounded = _mm256_srli_epi32(rounded, 16);
  const __m128i half =
      _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), half);
}
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
// Returns the lanes i with lo <= i < hi from `v` and all other lanes from `other`.
inline vf inside(vf v, int lo, int hi, vf other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane);
  const __m256i in = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(in));
}
inline __m128 fold(vf v) {
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
inline float total(vf v) {
  __m128 x = fold(v);
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(vf v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline float first(vf v) { return _mm256_cvtss_f32(v); }

inline vf nearest(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Returns x * 2^n for an integer n in [-127, 127]; n = -127 gives 0.
inline vf scale_by_power(vf x, vf n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

inline void transpose(vf *r) {
  vf t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

template <int Heads>
constexpr int keys_per_step() {
  return 4;
}
// Computes out[row * stride + i] = total(acc[row * Columns + i]).
template <int Rows, int Columns>
inline void store_totals(const vf *acc, float *out, int stride) {
  for (int i = 0; i < Rows * Columns; i += 4) {
    const vf low = _mm256_hadd_ps(acc[i], acc[i + 1]);
    const vf high = _mm256_hadd_ps(acc[i + 2], acc[i + 3]);
    _mm_storeu_ps(out + i / Columns * stride + i % Columns, fold(_mm256_hadd_ps(low, high)));
  }
}

}  // namespace

#include "kernels.inl"

namespace sgl_ext::attention {
const Kernels avx2_bf16 = kernels<WidenedProduct<bf16>>;
const Kernels avx2_fp32 = kernels<WidenedProduct<float>>;
}  // namespace sgl_ext::attention
