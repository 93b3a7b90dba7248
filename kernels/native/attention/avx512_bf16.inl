// Products of bf16 pairs that accumulate in fp32, shared by the translation units with AVX-512
// BF16.
#pragma once

#include "avx512.inl"

namespace {

struct DotProduct {
  using Element = bf16;
  using Operand = std::uint32_t;  // two adjacent elements of the summed dimension
  static constexpr int kPack = 2;
  static constexpr int kRowBlock = 24;
  static constexpr int kExpDegree = 4;  // error 3e-6, far below the rounding of weights to bf16

  static vf broadcast(const Operand *p) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static vf load_operands(const Operand *p) { return _mm512_loadu_ps(p); }
  static void store_operands(Operand *p, vf v) { _mm512_storeu_ps(p, v); }
  static vf multiply_add(vf a, vf b, vf sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  // Loads up to 32 elements; those past `count` are zero.
  static vf gather_operands(const Element *p, int count) {
    const __mmask16 present = count >= 32 ? 0xffff : (1u << (count / 2)) - 1u;
    return _mm512_maskz_loadu_ps(present, p);
  }
  // Packs the operands of the sum over keys: element d of two consecutive keys.
  static void pack_values(const Element *even, const Element *odd, Operand *out, int head_dim) {
    for (int d = 0; d < head_dim; d += kWidth) {
      const __m512i high = _mm512_slli_epi32(load_low(odd + d), 16);
      _mm512_storeu_si512(out + d, _mm512_or_si512(load_low(even + d), high));
    }
  }
  // Interleaves two vectors at a time within their 128-bit lanes: the first result holds the
  // dimensions 0-3, 8-11, ... of 32, the second result the other dimensions.
  template <int Vectors>
  static void load_values(const Element *even, const Element *odd, vf *x) {
    int v = 0;
    for (; v + 2 <= Vectors; v += 2) {
      const __m512i a = _mm512_loadu_si512(even + v * kWidth);
      const __m512i b = _mm512_loadu_si512(odd + v * kWidth);
      x[v] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
      x[v + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
    }
    if (v < Vectors) {
      const __m512i high = _mm512_slli_epi32(load_low(odd + v * kWidth), 16);
      x[v] = _mm512_castsi512_ps(_mm512_or_si512(load_low(even + v * kWidth), high));
    }
  }
  template <int Vectors>
  static void load_sums(const float *p, vf *x) {
    // In units of 4 dimensions: 0 2 4 6 for the first vector, 1 3 5 7 for the second.
    const __m512i even = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
    const __m512i odd = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
    int v = 0;
    for (; v + 2 <= Vectors; v += 2) {
      const __m512d a = _mm512_loadu_pd(p + v * kWidth);
      const __m512d b = _mm512_loadu_pd(p + (v + 1) * kWidth);
      x[v] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, even, b));
      x[v + 1] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, odd, b));
    }
    if (v < Vectors) x[v] = load(p + v * kWidth);
  }
  template <int Vectors>
  static void store_sums(float *p, const vf *x) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    int v = 0;
    for (; v + 2 <= Vectors; v += 2) {
      const __m512d a = _mm512_castps_pd(x[v]), b = _mm512_castps_pd(x[v + 1]);
      _mm512_storeu_pd(p + v * kWidth, _mm512_permutex2var_pd(a, low, b));
      _mm512_storeu_pd(p + (v + 1) * kWidth, _mm512_permutex2var_pd(a, high, b));
    }
    if (v < Vectors) store(p + v * kWidth, x[v]);
  }
  // Stores the weights of 32 keys; the sum adds the rounded weights that the products use.
  static vf store_weights(Operand *out, vf low, vf high, vf sum) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(out, reinterpret_cast<__m512i>(pairs));
    const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
    return _mm512_dpbf16_ps(sum, pairs, ones);
  }
};

}  // namespace
