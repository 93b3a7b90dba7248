// Estimate of the attention of queries to entries whose keys are available only as codes (product
// quantisation): each key is split into subspaces, and each part is encoded as the nearest of 256
// centroids.
#pragma once

#include <cstddef>
#include <cstdint>

#include "log_sum.h"

namespace sgl_ext::codes {

constexpr std::size_t centroids = 256;

struct Shape {
  std::size_t entries;
  std::size_t heads;     // query heads; those of one KV head are consecutive
  std::size_t kv_heads;
  std::size_t subspaces;
  std::size_t head_dim;  // a multiple of subspaces
};

// Codes of the keys, and the parameters that they were encoded with. Centroids are the upper halves
// of float32 (bfloat16).
//
//   codes       [kv_heads, entries, subspaces]
//   centroids   [kv_heads, head_dim, 256]: the dimensions of a subspace are consecutive
//   projection  [kv_heads, head_dim, head_dim]: applied to queries
//   mean        [kv_heads, head_dim]: mean of the keys
struct Keys {
  const std::uint8_t *codes;
  const std::uint16_t *centroids;
  const float *projection;
  const float *mean;
};

// Estimates the attention of each of `count` queries to the entries, summed over heads.
//
//   queries  [count, heads, head_dim]
//   beside   [count, heads]: log-sum-exp of the logits of all keys without codes
//   out      [count, entries]
void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, int threads, float *out);

// Does the same, but computes the log-sum-exp from the keys without codes in `seen`. Those of
// `beside` are further keys; null if there are none.
void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const Seen &seen, const float *beside, int threads, float *out);

}  // namespace sgl_ext::codes
