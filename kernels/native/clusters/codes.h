// How much attention queries pay to entries of whose keys only codes are at hand: each key is cut
// into subspaces, and of each part the nearest of 256 centroids is kept (product quantisation).
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext::codes {

constexpr std::size_t centroids = 256;

struct Shape {
  std::size_t entries;
  std::size_t heads;     // of queries; those of one KV head follow each other
  std::size_t kv_heads;
  std::size_t subspaces;
};

// For each of `queries` queries, [entries] attention summed over heads.
//
//   codes   [kv_heads, entries, subspaces]
//   tables  [queries, heads, subspaces, centroids]: the logits of each centroid
//   beside  [queries, heads]: logarithm of the exponentials' sum over what has no codes
//   out     [queries, entries]
void mass(const Shape &shape, const std::uint8_t *codes, std::size_t queries, const float *tables,
          const float *beside, int threads, float *out);

}  // namespace sgl_ext::codes
