// Logarithms of sums of exponentials of logits, of what every query sees anyway.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext {

// Keys in bfloat16 or float32: [.., kv_heads, head_dim], rows `stride` elements apart.
struct Near {
  const void *keys;
  std::size_t stride;
};

struct LogSum {
  std::size_t heads;     // of queries; those of one KV head follow each other
  std::size_t kv_heads;
  std::size_t head_dim;  // a multiple of 16
  bool bfloat16;
  float scale;
};

// For each of `rows` queries [rows, heads, head_dim]: over all `count` of `near`, and over the
// first lengths[row] of `slots` of `own`. out [rows, heads]. `threads` share the heads.
void log_sum(const LogSum &shape, const float *queries, std::size_t rows, Near near,
             std::size_t count, Near own, const std::int64_t *slots, const std::int64_t *lengths,
             int threads, float *out);

}  // namespace sgl_ext
