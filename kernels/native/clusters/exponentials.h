// Helpers for codes and logits: bfloat16, exponentials, function clones per instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One clone per instruction set, chosen when the module is loaded.
#define SGLEXT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SGLEXT_CLONES
#endif

namespace sgl_ext {

// Converts a stored number to float: a float32, or the bits of a bfloat16.
[[gnu::always_inline]] inline float wide(float value) { return value; }

[[gnu::always_inline]] inline float wide(std::uint16_t upper) {
  const std::uint32_t bits = std::uint32_t(upper) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns exp(x) for x <= 0 with an absolute error below 2e-7. Below -60 it returns exp(-60) =
// 8.8e-27, which is negligible next to 1 and gives no denormal number in products.
[[gnu::always_inline]] inline float exp_of(float x) {
  const float scaled = (x > -60.0f ? x : -60.0f) * 1.44269504f;
  const std::int32_t biased = std::int32_t(scaled + 127.0f);  // rounds down, because it is positive
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
