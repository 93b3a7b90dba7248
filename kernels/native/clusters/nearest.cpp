#include "nearest.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"

namespace sgl_ext {
namespace {

// Eight lanes, because GCC compares wider vectors one element at a time where it has only AVX2.
typedef std::int32_t Numbers __attribute__((vector_size(32)));

constexpr std::size_t lanes = lanes_of<Eight>;
constexpr std::size_t together = 4;  // points that share the loads of a centroid

// Centroids with one per lane. Half of the squared distance, less the same for all centroids, is
// half of the squared norm less the dot product.
struct Columns {
  std::vector<float> values;  // [width, size]
  std::vector<float> halves;  // [size]: half of the squared norm; infinite if there is no centroid
  std::size_t width, size;

  Columns(const float *centroids, std::size_t count, std::size_t width)
      : width(width), size((count + lanes - 1) / lanes * lanes) {
    values.assign(width * size, 0.0f);
    halves.assign(size, INFINITY);
    for (std::size_t c = 0; c < count; ++c) {
      halves[c] = 0.0f;
      for (std::size_t i = 0; i < width; ++i) {
        const float value = centroids[c * width + i];
        values[i * size + c] = value;
        halves[c] += value * value / 2;
      }
    }
  }
};

SGLEXT_CLONES
void find(const float *points, std::size_t count, const Columns &columns, std::int64_t *out) {
  const std::size_t width = columns.width, size = columns.size;
  for (std::size_t first = 0; first < count; first += together) {
    const float *from[together];
    for (std::size_t p = 0; p < together; ++p)
      from[p] = points + std::min(first + p, count - 1) * width;
    Eight least[together];
    Numbers best[together], numbers;
    for (std::size_t l = 0; l < lanes; ++l) numbers[l] = std::int32_t(l);
    for (std::size_t p = 0; p < together; ++p) {
      least[p] = all<Eight>(INFINITY);
      best[p] = numbers;
    }
    for (std::size_t c = 0; c < size; c += lanes, numbers += std::int32_t(lanes)) {
      Eight far[together];
      for (std::size_t p = 0; p < together; ++p) far[p] = load<Eight>(columns.halves.data() + c);
      for (std::size_t i = 0; i < width; ++i) {
        const Eight values = load<Eight>(columns.values.data() + i * size + c);
        for (std::size_t p = 0; p < together; ++p) far[p] -= from[p][i] * values;
      }
      for (std::size_t p = 0; p < together; ++p) {
        const Numbers nearer = far[p] < least[p];
        least[p] = nearer ? far[p] : least[p];
        best[p] = nearer ? numbers : best[p];
      }
    }
    for (std::size_t p = 0; p < std::min(together, count - first); ++p) {
      std::size_t at = 0;
      for (std::size_t l = 1; l < lanes; ++l)
        if (least[p][l] < least[p][at] || (least[p][l] == least[p][at] && best[p][l] < best[p][at]))
          at = l;
      out[first + p] = best[p][at];
    }
  }
}

}  // namespace

void nearest(const float *points, std::size_t count, const float *centroids, std::size_t size,
             std::size_t width, std::int64_t *out) {
  find(points, count, Columns(centroids, size, width), out);
}

}  // namespace sgl_ext
