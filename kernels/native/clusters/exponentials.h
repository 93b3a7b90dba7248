// What codes and logits share: bfloat16, exponentials, functions for several instruction sets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One clone per instruction set, chosen when the module is loaded.
#define SGL_EXT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SGL_EXT_CLONES
#endif

namespace sgl_ext {

// A number as it is stored: a float32, or a bfloat16 by its bits.
[[gnu::always_inline]] inline float wide(float value) { return value; }

[[gnu::always_inline]] inline float wide(std::uint16_t upper) {
  const std::uint32_t bits = std::uint32_t(upper) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// exp(x) for x <= 0, within 2e-7 of it; below -60 what it is there, 8.8e-27: nothing beside 1, and
// what it is multiplied by leaves no denormal number.
[[gnu::always_inline]] inline float exp_of(float x) {
  const float scaled = std::max(x, -60.0f) * 1.44269504f;
  const std::int32_t biased = std::int32_t(scaled + 127.0f);  // rounded down: it is positive
  const float rest = scaled - float(biased - 127);  // 2^rest as a polynomial on [0, 1)
  float power = 1.8775767e-3f;
  power = power * rest + 8.9893397e-3f;
  power = power * rest + 5.5826318e-2f;
  power = power * rest + 2.4015361e-1f;
  power = power * rest + 6.9315308e-1f;
  power = power * rest + 9.9999994e-1f;
  const std::int32_t exponent = biased << 23;
  float two;
  std::memcpy(&two, &exponent, sizeof two);
  return power * two;
}

}  // namespace sgl_ext
