// Vectors of float: the values of several heads, one per lane.
#pragma once

#include <cstddef>
#include <cstring>

#include "exponentials.h"

namespace sgl_ext {

typedef float One;
typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

template <class Lanes>
constexpr std::size_t lanes_of = sizeof(Lanes) / sizeof(float);

template <class Lanes>
[[gnu::always_inline]] inline Lanes load(const float *from) {
  Lanes one;
  std::memcpy(&one, from, sizeof one);
  return one;
}

template <class Lanes>
[[gnu::always_inline]] inline void store(const Lanes &one, float *into) {
  std::memcpy(into, &one, sizeof one);
}

template <class Lanes>
[[gnu::always_inline]] inline Lanes all(float value) {
  return Lanes{} + value;
}

// Returns the larger value per lane; `b` if either is NaN, so that a NaN in `a` is ignored.
template <class Lanes>
[[gnu::always_inline]] inline Lanes larger(const Lanes &a, const Lanes &b) {
  return a > b ? a : b;
}

// Consecutive values of one head. Wider vectors would be split where there is only AVX2, and GCC
// passes the parts through memory.
typedef Eight Values;
constexpr std::size_t kValues = lanes_of<Values>;

[[gnu::always_inline]] inline Values values_at(const float *from) { return load<Values>(from); }

[[gnu::always_inline]] inline Values values_at(const std::uint16_t *from) {
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
  typedef std::uint32_t Bits __attribute__((vector_size(32)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
  Values values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

[[gnu::always_inline]] inline float sum(const Values &values) {
  Four halves[2];
  std::memcpy(halves, &values, sizeof halves);
  const Four four = halves[0] + halves[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Computes exp(value - highest) of values [count, lanes] in place; returns the sum per lane.
template <class Lanes>
[[gnu::always_inline]] inline Lanes exponentials(float *values, std::size_t count,
                                                 const Lanes &highest) {
  constexpr std::size_t lanes = lanes_of<Lanes>, width = 16;
  float top[width], sums[width] = {};
  for (std::size_t l = 0; l < width; l += lanes) store(highest, top + l);
  const std::size_t end = count * lanes;
  std::size_t i = 0;
  for (; i + width <= end; i += width)
    for (std::size_t l = 0; l < width; ++l) {
      values[i + l] = exp_of(values[i + l] - top[l]);
      sums[l] += values[i + l];
    }
  for (std::size_t l = 0; i < end; ++i, ++l) {
    values[i] = exp_of(values[i] - top[l]);
    sums[l] += values[i];
  }
  Lanes sum{};
  for (std::size_t l = 0; l < width; l += lanes) sum += load<Lanes>(sums + l);
  return sum;
}

}  // namespace sgl_ext
