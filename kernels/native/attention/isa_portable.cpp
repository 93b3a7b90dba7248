// Portable kernels: 4 fp32 lanes in generic vectors of the compiler (SSE2, NEON and similar).
#include <cstring>

#include "kernels.h"

namespace {

constexpr int kWidth = 4;
constexpr int kGemmRows = 4;
constexpr int kGemmVectors = 2;
constexpr int kHeadBlock = 2;

typedef float vf __attribute__((vector_size(16)));
typedef std::int32_t vi __attribute__((vector_size(16)));
typedef std::uint16_t vh __attribute__((vector_size(8)));

struct bf16 {
  std::uint16_t bits;
};

inline vf splat(float x) { return vf{x, x, x, x}; }
inline vi splat_int(std::int32_t x) { return vi{x, x, x, x}; }
inline vf load(const float *p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vf load(const bf16 *p) {
  vh half;
  std::memcpy(&half, p, sizeof half);
  vi wide = __builtin_convertvector(half, vi) << 16;
  return reinterpret_cast<vf>(wide);
}
inline void store(float *p, vf v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16 *p, vf v) {
  vi bits = reinterpret_cast<vi>(v);
  vi rounded = bits + splat_int(0x7fff) + ((bits >> 16) & 1);
  vi nan = (v != v);
  rounded = (nan & splat_int(0x7fc00000)) | (~nan & rounded);
  vh half = __builtin_convertvector((rounded >> 16) & 0xffff, vh);
  std::memcpy(p, &half, sizeof half);
}
inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
// Same as on x86: returns b if either operand is NaN.
inline vf max(vf a, vf b) {
  vi greater = (a > b);
  return reinterpret_cast<vf>((greater & reinterpret_cast<vi>(a)) |
                              (~greater & reinterpret_cast<vi>(b)));
}
// Returns the lanes i with lo <= i < hi from `v` and all other lanes from `other`.
inline vf inside(vf v, int lo, int hi, vf other) {
  vi lane = {0, 1, 2, 3};
  vi in = (lane >= splat_int(lo)) & (lane < splat_int(hi));
  return reinterpret_cast<vf>((in & reinterpret_cast<vi>(v)) |
                              (~in & reinterpret_cast<vi>(other)));
}
inline float largest(vf v) {
  float a = v[0] > v[1] ? v[0] : v[1];
  float b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
inline float total(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float first(vf v) { return v[0]; }

// Returns 2^n for an integer n in [-127, 127]; n = -127 gives 0.
inline vf power(vf n) {
  vi exponent = (__builtin_convertvector(n, vi) + splat_int(127)) << 23;
  return reinterpret_cast<vf>(exponent);
}
inline vf nearest(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the sum has no fraction bits
  return (x + magic) - magic;
}
inline vf scale_by_power(vf x, vf n) { return x * power(n); }

inline void transpose(vf *r) {
  vf t[4];
  for (int i = 0; i < 4; ++i) t[i] = vf{r[0][i], r[1][i], r[2][i], r[3][i]};
  for (int i = 0; i < 4; ++i) r[i] = t[i];
}

template <int Heads>
constexpr int keys_per_step() {
  return 4;
}
// Computes out[row * stride + i] = total(acc[row * Columns + i]).
template <int Rows, int Columns>
inline void store_totals(const vf *acc, float *out, int stride) {
  for (int i = 0; i < Rows * Columns; ++i)
    out[i / Columns * stride + i % Columns] = total(acc[i]);
}

}  // namespace

#include "kernels.inl"

namespace sgl_ext::attention {
const Kernels portable_bf16 = kernels<WidenedProduct<bf16>>;
const Kernels portable_fp32 = kernels<WidenedProduct<float>>;
}  // namespace sgl_ext::attention
