#include "rotation.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One clone per instruction set, chosen when the module is loaded.
#define SGLEXT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SGLEXT_CLONES
#endif

namespace sgl_ext::rotation {
namespace {

struct Bf16 {
  std::uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(Bf16 value) {
  const std::uint32_t bits = std::uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float value, float &out) { out = value; }

inline void narrow(float value, Bf16 &out) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  bits += 0x7fffu + ((bits >> 16) & 1u);  // round to nearest even
  out.bits = nan ? std::uint16_t(0x7fc0) : std::uint16_t(bits >> 16);
}

// Rotates `pairs` pairs of elements. The elements of a pair are `distance` apart; consecutive
// pairs begin `step` elements apart.
template <class T, int step>
inline void rotate(const T *__restrict from, T *__restrict to, int pairs, int distance,
                   const float *__restrict cosines, const float *__restrict sines) {
  for (int i = 0; i < pairs; ++i) {
    const float a = widen(from[i * step]);
    const float b = widen(from[i * step + distance]);
    narrow(a * cosines[i] - b * sines[i], to[i * step]);
    narrow(b * cosines[i] + a * sines[i], to[i * step + distance]);
  }
}

template <class T>
inline void copy_token(const char *from_bytes, char *to_bytes, const Shape &shape,
                       const float *cosines, const float *sines) {
  const T *from = reinterpret_cast<const T *>(from_bytes);
  T *to = reinterpret_cast<T *>(to_bytes);
  const int pairs = shape.rotary_dim / 2;
  const std::size_t rest = std::size_t(shape.head_dim - shape.rotary_dim) * sizeof(T);
  const std::size_t values = std::size_t(shape.heads) * shape.head_dim;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int head = 0; head < shape.heads; ++head) {
      if (shape.interleaved) {
        rotate<T, 2>(from, to, pairs, 1, cosines, sines);
      } else {
        rotate<T, 1>(from, to, pairs, pairs, cosines, sines);
      }
      if (rest) std::memcpy(to + shape.rotary_dim, from + shape.rotary_dim, rest);
      from += shape.head_dim;
      to += shape.head_dim;
    }
    std::memcpy(to, from, values * sizeof(T));
    from += values;
    to += values;
  }
}

template <class T, class CopyToken>
inline void copy_runs(const Run *runs, std::size_t count, std::int64_t first, std::int64_t last,
                      CopyToken copy_token) {
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < count && begin < last; begin += runs[i++].tokens) {
    const Run &run = runs[i];
    const std::int64_t from = first > begin ? first - begin : 0;
    const std::int64_t to = last - begin < run.tokens ? last - begin : run.tokens;
    for (std::int64_t token = from; token < to; ++token) {
      copy_token(run.from + token * run.from_pitch, run.to + token * run.to_pitch);
    }
  }
}

// The callees are inlined into each clone, so that they are compiled for its instruction set.
#define SGLEXT_COPY(name, T)                                                                \
  SGLEXT_CLONES void name(const Run *runs, std::size_t count, std::int64_t first,           \
                           std::int64_t last, const Shape &shape, const float *cosines,      \
                           const float *sines) {                                             \
    copy_runs<T>(runs, count, first, last, [&](const char *from, char *to) {                 \
      copy_token<T>(from, to, shape, cosines, sines);                                        \
    });                                                                                      \
  }

SGLEXT_COPY(copy_bf16, Bf16)
SGLEXT_COPY(copy_fp32, float)

}  // namespace

void copy(const Run *runs, std::size_t count, std::int64_t first, std::int64_t last,
          const Shape &shape, Element element, const float *cosines, const float *sines) {
  (element == Element::bf16 ? copy_bf16 : copy_fp32)(runs, count, first, last, shape, cosines,
                                                     sines);
}

}  // namespace sgl_ext::rotation
