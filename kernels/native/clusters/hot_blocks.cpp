#include "hot_blocks.h"

#include <algorithm>
#include <numeric>

namespace sgl_ext {

std::vector<std::int64_t> step(const Hot &hot, double decay, const std::int64_t *activated,
                               std::size_t count, const std::int64_t *there,
                               std::size_t available) {
  for (std::size_t b = 0; b < hot.blocks; ++b) hot.frequency[b] *= decay;
  for (std::size_t i = 0; i < count; ++i) hot.frequency[activated[i]] += 1.0;
  std::vector<std::int64_t> outside;
  for (std::size_t i = 0; i < available; ++i)
    if (hot.place[there[i]] < 0) outside.push_back(there[i]);
  std::stable_sort(outside.begin(), outside.end(), [&](std::int64_t a, std::int64_t b) {
    return hot.frequency[a] > hot.frequency[b];
  });
  std::vector<std::size_t> inside(hot.capacity);
  std::iota(inside.begin(), inside.end(), std::size_t(0));
  const std::size_t most = std::min(outside.size(), inside.size());
  std::partial_sort(inside.begin(), inside.begin() + most, inside.end(),
                    [&](std::size_t a, std::size_t b) {
                      const double of_a = hot.frequency[hot.held[a]];
                      const double of_b = hot.frequency[hot.held[b]];
                      return of_a < of_b || (of_a == of_b && a < b);
                    });
  // Best block outside against worst block inside: after the first that is not better, none is.
  std::size_t coming = 0;
  for (; coming < most; ++coming) {
    std::int64_t &held = hot.held[inside[coming]];
    if (hot.frequency[outside[coming]] <= hot.frequency[held]) break;
    hot.place[held] = -1;
    held = outside[coming];
    hot.place[held] = std::int64_t(inside[coming]);
  }
  outside.resize(coming);
  return outside;
}

}  // namespace sgl_ext
