// How much attention queries pay to entries of whose keys only codes are at hand: each key is cut
// into subspaces, and of each part the nearest of 256 centroids is kept (product quantisation).
#pragma once

#include <cstddef>
#include <cstdint>

#include "log_sum.h"

namespace sgl_ext::codes {

constexpr std::size_t centroids = 256;

struct Shape {
  std::size_t entries;
  std::size_t heads;     // of queries; those of one KV head follow each other
  std::size_t kv_heads;
  std::size_t subspaces;
  std::size_t head_dim;  // a multiple of subspaces
};

// What keys were coded by. Centroids are the upper halves of float32 (bfloat16).
//
//   codes       [kv_heads, entries, subspaces]
//   centroids   [kv_heads, head_dim, 256]: a subspace's dimensions follow each other
//   projection  [kv_heads, head_dim, head_dim]: turns queries
//   mean        [kv_heads, head_dim] of the keys
struct Keys {
  const std::uint8_t *codes;
  const std::uint16_t *centroids;
  const float *projection;
  const float *mean;
};

// For each of `count` queries, [entries] attention summed over heads.
//
//   queries  [count, heads, head_dim]
//   beside   [count, heads]: logarithm of the exponentials' sum over what has no codes
//   out      [count, entries]
void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, int threads, float *out);

// The same, where what has no codes is at hand.
void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const Seen &beside, int threads, float *out);

}  // namespace sgl_ext::codes
