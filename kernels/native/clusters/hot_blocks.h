// Selection of the blocks kept in memory: those activated most often in recent steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sgl_ext {

struct Hot {
  double *frequency;     // [blocks]
  std::int64_t *place;   // [blocks] place in memory; -1 if not in memory
  std::size_t blocks;
  std::int64_t *held;    // [capacity] block in each place
  std::size_t capacity;
};

// Updates the selection after a step. Multiplies all frequencies by `decay` and adds one for each
// activated block. Then the most frequent blocks of `there` that are not in memory replace the
// least frequent blocks in memory, as long as their frequency is higher. Returns the blocks that
// were brought into memory, the most frequent first; ties in the order of `there`.
std::vector<std::int64_t> step(const Hot &hot, double decay, const std::int64_t *activated,
                               std::size_t count, const std::int64_t *there, std::size_t available);

}  // namespace sgl_ext
