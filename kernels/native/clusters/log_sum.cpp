#include "log_sum.h"

#include <algorithm>
#include <cmath>

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
  for (std::size_t half = kLanes / 2; half; half /= 2)
    for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

template <class T>
[[gnu::always_inline]] inline float head_of(const Seen &seen, std::size_t row, std::size_t kv_head,
                                            const float *query, float scale, float *logits) {
  const std::size_t from = kv_head * seen.head_dim;
  const T *keys = static_cast<const T *>(seen.near.keys) + from;
  float *at = logits;
  for (std::size_t i = 0; i < seen.count; ++i)
    *at++ = scale * product(query, keys + i * seen.near.stride, seen.head_dim);
  keys = static_cast<const T *>(seen.own.keys) + from;
  const std::int64_t *slots = seen.slots + seen.starts[row], *end = slots + seen.lengths[row];
  for (; slots < end; ++slots)
    *at++ = scale * product(query, keys + std::size_t(*slots) * seen.own.stride, seen.head_dim);
  if (at == logits) return -INFINITY;
  const float highest = *std::max_element(logits, at);
  return highest + std::log(exponentials(logits, std::size_t(at - logits), highest));
}

SGL_EXT_CLONES
float narrow(const Seen &seen, std::size_t row, std::size_t kv_head, const float *query,
             float scale, float *logits) {
  return head_of<std::uint16_t>(seen, row, kv_head, query, scale, logits);
}

SGL_EXT_CLONES
float full(const Seen &seen, std::size_t row, std::size_t kv_head, const float *query, float scale,
           float *logits) {
  return head_of<float>(seen, row, kv_head, query, scale, logits);
}

}  // namespace

float log_sum(const Seen &seen, std::size_t row, std::size_t kv_head, const float *query,
              float scale, float *logits) {
  return (seen.bfloat16 ? narrow : full)(seen, row, kv_head, query, scale, logits);
}

}  // namespace sgl_ext
