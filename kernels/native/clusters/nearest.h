// Nearest centroids of points, for k-means and the codes of keys.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext {

// Finds the nearest of `size` centroids for each of `count` points of the same subspace; of equally
// near ones the first.
//
//   points     [count, width]
//   centroids  [size, width], at least one
//   out        [count]
void nearest(const float *points, std::size_t count, const float *centroids, std::size_t size,
             std::size_t width, std::int64_t *out);

}  // namespace sgl_ext
