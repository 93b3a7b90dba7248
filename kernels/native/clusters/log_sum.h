// Logarithms of sums of exponentials of logits, of what a query sees anyway.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace sgl_ext {

// Keys in bfloat16 or float32: [.., kv_heads, head_dim], rows `stride` elements apart.
struct Near {
  const void *keys;
  std::size_t stride;
};

// What rows see: all `count` of `near`, and of `own` the lengths[row] slots from starts[row] on.
struct Seen {
  std::size_t head_dim;  // a multiple of 16
  bool bfloat16;
  Near near;
  std::size_t count;
  Near own;
  const std::int64_t *slots;
  const std::int64_t *starts;
  const std::int64_t *lengths;

  // Logits that any of the rows has.
  std::size_t most(std::size_t rows) const {
    return count + (rows ? std::size_t(*std::max_element(lengths, lengths + rows)) : 0);
  }
};

// Of one query [head_dim] of a row and its KV head; minus infinity where the row sees nothing.
// `logits` has room for all of the row's.
float log_sum(const Seen &seen, std::size_t row, std::size_t kv_head, const float *query,
              float scale, float *logits);

}  // namespace sgl_ext
