// AVX-512 vector operations on 16 fp32 lanes, shared by both AVX-512 translation units.
#include <immintrin.h>

#include "kernels.h"

namespace {

constexpr int kWidth = 16;
constexpr int kGemmRows = 6;
constexpr int kGemmVectors = 4;
constexpr int kHeadBlock = 4;

using vf = __m512;

struct bf16 {
  std::uint16_t bits;
};

inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf load(const float *p) { return _mm512_loadu_ps(p); }
inline __m512i load_low(const bf16 *p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline vf load(const bf16 *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(load_low(p), 16)); }
inline void store(float *p, vf v) { _mm512_storeu_ps(p, v); }
inline void store(bf16 *p, vf v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), half);
}
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
// Returns the lanes i with lo <= i < hi from `v` and all other lanes from `other`.
inline vf inside(vf v, int lo, int hi, vf other) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 in = _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(lo), _MM_CMPINT_NLT) &
                       _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(hi), _MM_CMPINT_LT);
  return _mm512_mask_mov_ps(other, in, v);
}
inline float total(vf v) { return _mm512_reduce_add_ps(v); }
inline float largest(vf v) { return _mm512_reduce_max_ps(v); }
inline float first(vf v) { return _mm512_cvtss_f32(v); }

inline vf nearest(vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Returns x * 2^n for an integer n in [-127, 127]; n = -127 gives 0. (scalef would be shorter, but
// on Zen 4 it runs at less than half the speed of this sequence.)
inline vf scale_by_power(vf x, vf n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_mul_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}

inline void transpose(vf *r) {
  vf t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
}

template <int Heads>
constexpr int keys_per_step() {
  return Heads == 1 ? 16 : Heads == 2 ? 8 : 4;
}
// Computes out[row * stride + i] = total(acc[row * Columns + i]): 12 or 16 totals in one tree of
// additions.
template <int Rows, int Columns>
inline void store_totals(const vf *acc, float *out, int stride) {
  vf quarter[4];  // quarter[e]: 128-bit lane g holds 4 partial sums of vector 4g + e
  for (int e = 0; e < 4; ++e) {
    const vf a = acc[e], b = acc[4 + e], c = acc[8 + e];
    const vf d = Rows * Columns > 12 ? acc[12 + e] : _mm512_setzero_ps();
    const vf ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const vf cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    quarter[e] = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  const vf low = add(_mm512_unpacklo_ps(quarter[0], quarter[1]),
                     _mm512_unpackhi_ps(quarter[0], quarter[1]));
  const vf high = add(_mm512_unpacklo_ps(quarter[2], quarter[3]),
                      _mm512_unpackhi_ps(quarter[2], quarter[3]));
  const vf all = add(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  // Not through memory: a single store cannot be forwarded to four loads.
  const auto put = [&](int i, __m128 x) {
    _mm_storeu_ps(out + i / Columns * stride + i % Columns, x);
  };
  put(0, _mm512_castps512_ps128(all));
  put(4, _mm512_extractf32x4_ps(all, 1));
  put(8, _mm512_extractf32x4_ps(all, 2));
  if (Rows * Columns > 12) put(12, _mm512_extractf32x4_ps(all, 3));
}

}  // namespace
