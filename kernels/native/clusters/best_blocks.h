// Which blocks of entries queries are given, from a score of every entry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext {

// Blocks of consecutive entries, dealt out to devices in turn; the last may have fewer.
struct Dealt {
  std::size_t entries;
  std::size_t block;
  std::size_t devices;
  std::size_t each;  // blocks that every device gives, if it has as many

  std::size_t blocks() const { return (entries + block - 1) / block; }
  std::size_t chosen() const;
};

// For each row of scores [rows, entries] the blocks of the largest sums, as many of each device; of
// equal ones the first. Writes their numbers, rising, [rows, dealt.chosen()].
void best_blocks(const Dealt &dealt, const float *scores, std::size_t rows, std::int64_t *out);

}  // namespace sgl_ext
