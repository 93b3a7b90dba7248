// Selection of the blocks of entries that queries attend to, from the scores of all entries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext {

// Blocks of consecutive entries, which are dealt to the devices in turn; the last block may have
// fewer entries.
struct Dealt {
  std::size_t entries;
  std::size_t block;
  std::size_t devices;
  std::size_t each;  // blocks to select of each device; all of them if it has fewer

  std::size_t blocks() const { return (entries + block - 1) / block; }
  std::size_t chosen() const;
};

// Selects the blocks with the largest sums for each row of scores [rows, entries], equally many of
// each device; of equal sums the first. Writes the block numbers, ascending in each row, to `out`
// [rows, dealt.chosen()].
void best_blocks(const Dealt &dealt, const float *scores, std::size_t rows, std::int64_t *out);

}  // namespace sgl_ext
