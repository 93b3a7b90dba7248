#include "best_blocks.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace sgl_ext {

std::size_t Dealt::chosen() const {
  std::size_t all = 0;
  for (std::size_t device = 0; device < std::min(devices, blocks()); ++device)
    all += std::min(each, (blocks() - device - 1) / devices + 1);
  return all;
}

void best_blocks(const Dealt &dealt, const float *scores, std::size_t rows, std::int64_t *out) {
  const std::size_t blocks = dealt.blocks(), chosen = dealt.chosen();
  std::vector<float> sums(blocks);
  std::vector<std::int64_t> own;
  for (std::size_t row = 0; row < rows; ++row) {
    const float *from = scores + row * dealt.entries;
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t end = std::min((b + 1) * dealt.block, dealt.entries);
      float sum = 0.0f;
      for (std::size_t e = b * dealt.block; e < end; ++e) sum += from[e];
      sums[b] = sum == sum ? sum : -INFINITY;  // NaN cannot be ordered
    }
    const auto better = [&](std::int64_t a, std::int64_t b) {
      return sums[a] > sums[b] || (sums[a] == sums[b] && a < b);
    };
    std::int64_t *const begin = out + row * chosen;
    std::int64_t *at = begin;
    for (std::size_t device = 0; device < std::min(dealt.devices, blocks); ++device) {
      own.clear();
      for (std::size_t b = device; b < blocks; b += dealt.devices) own.push_back(b);
      const std::size_t count = std::min(dealt.each, own.size());
      if (count < own.size())
        std::nth_element(own.begin(), own.begin() + count, own.end(), better);
      at = std::copy(own.begin(), own.begin() + count, at);
    }
    std::sort(begin, at);
  }
}

}  // namespace sgl_ext
