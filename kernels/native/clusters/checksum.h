// Checksum that detects accidental corruption of stored bytes; not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sgl_ext {

// Four independent sums, each with two multiplications and a rotation per eight bytes, so that the
// memory bandwidth is the limit.
inline std::uint64_t checksum(const std::uint8_t *bytes, std::size_t size) {
  constexpr std::uint64_t factor = 0x9e3779b97f4a7c15u, other = 0xc2b2ae3d27d4eb4fu;
  const auto turn = [](std::uint64_t x, int by) { return (x << by) | (x >> (64 - by)); };
  std::uint64_t sums[4] = {factor, other, factor ^ other, size};
  std::size_t at = 0;
  for (; at + 32 <= size; at += 32) {
    std::uint64_t words[4];
    std::memcpy(words, bytes + at, sizeof words);
    for (int i = 0; i < 4; ++i) sums[i] = turn(sums[i] ^ (words[i] * factor), 31) * other;
  }
  for (; at < size; ++at) sums[at % 4] = turn(sums[at % 4] ^ (bytes[at] * factor), 31) * other;
  std::uint64_t all = 0;
  for (int i = 0; i < 4; ++i) all = turn(all ^ (sums[i] * factor), 27) * other;
  return all ^ (all >> 29);
}

}  // namespace sgl_ext
