#include "log_sum.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "exponentials.h"

namespace sgl_ext {
namespace {

constexpr std::size_t kLanes = 16;

// The product of a query with one key, in lanes, so that it is vectorised as it is written.
template <class T>
[[gnu::always_inline]] inline float product(const float *query, const T *key, std::size_t head_dim) {
  float lanes[kLanes] = {};
  for (std::size_t i = 0; i < head_dim; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lanes[l] += query[i + l] * wide(key[i + l]);
  float sum = 0.0f;
  for (float lane : lanes) sum += lane;
  return sum;
}

template <class T>
[[gnu::always_inline]] inline float head_of(const LogSum &shape, const float *query, std::size_t kv_head, Near near,
                     std::size_t count, Near own, const std::int64_t *slots, std::size_t length,
                     float *logits) {
  const std::size_t from = kv_head * shape.head_dim;
  const T *keys = static_cast<const T *>(near.keys) + from;
  for (std::size_t i = 0; i < count; ++i)
    logits[i] = shape.scale * product(query, keys + i * near.stride, shape.head_dim);
  keys = static_cast<const T *>(own.keys) + from;
  for (std::size_t i = 0; i < length; ++i)
    logits[count + i] =
        shape.scale * product(query, keys + std::size_t(slots[i]) * own.stride, shape.head_dim);
  const std::size_t all = count + length;
  float highest = -INFINITY;
  for (std::size_t i = 0; i < all; ++i) highest = std::max(highest, logits[i]);
  return all ? highest + std::log(exponentials(logits, all, highest)) : -INFINITY;
}

SGL_EXT_CLONES
float narrow_head(const LogSum &shape, const float *query, std::size_t kv_head, Near near,
                  std::size_t count, Near own, const std::int64_t *slots, std::size_t length,
                  float *logits) {
  return head_of<std::uint16_t>(shape, query, kv_head, near, count, own, slots, length, logits);
}

SGL_EXT_CLONES
float wide_head(const LogSum &shape, const float *query, std::size_t kv_head, Near near,
                std::size_t count, Near own, const std::int64_t *slots, std::size_t length,
                float *logits) {
  return head_of<float>(shape, query, kv_head, near, count, own, slots, length, logits);
}

}  // namespace

void log_sum(const LogSum &shape, const float *queries, std::size_t rows, Near near,
             std::size_t count, Near own, const std::int64_t *slots, const std::int64_t *lengths,
             float *out) {
  const std::size_t group = shape.heads / shape.kv_heads;
  std::size_t most = 0;
  for (std::size_t row = 0; row < rows; ++row) most = std::max(most, std::size_t(lengths[row]));
  std::vector<float> logits(count + most);
  const auto head = shape.bfloat16 ? narrow_head : wide_head;
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t h = 0; h < shape.heads; ++h) {
      const std::size_t at = row * shape.heads + h;
      out[at] = head(shape, queries + at * shape.head_dim, h / group, near, count, own, slots,
                     std::size_t(lengths[row]), logits.data());
    }
}

}  // namespace sgl_ext
