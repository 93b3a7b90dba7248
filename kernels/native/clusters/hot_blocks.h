// Which blocks are kept in memory: those that have been wanted most often lately.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sgl_ext {

struct Hot {
  double *frequency;     // [blocks]
  std::int64_t *place;   // [blocks] in memory; -1 where a block is not
  std::size_t blocks;
  std::int64_t *held;    // [capacity] the block in each place
  std::size_t capacity;
};

// A step takes a part of all frequencies and adds one to what it has activated; of what is there,
// the best of those outside then replace the worst inside, as long as they are better. Returns the
// blocks that have come in, the best first; of equal ones the first that was named.
std::vector<std::int64_t> step(const Hot &hot, double decay, const std::int64_t *activated,
                               std::size_t count, const std::int64_t *there, std::size_t available);

}  // namespace sgl_ext
