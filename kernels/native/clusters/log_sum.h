// Log-sum-exp of the logits of the keys that a query sees whatever blocks are selected.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lanes.h"

namespace sgl_ext {

// Keys in bfloat16 or float32: [.., kv_heads, head_dim], rows `stride` elements apart.
struct Near {
  const void *keys;
  std::size_t stride;
};

// Keys that a row sees: the first `count` of `near`, and those of `own` in the lengths[row] slots
// that begin at slots[starts[row]].
struct Seen {
  std::size_t head_dim;  // a multiple of 16
  bool bfloat16;
  Near near;
  std::size_t count;
  Near own;
  const std::int64_t *slots;
  const std::int64_t *starts;
  const std::int64_t *lengths;

  // Returns the largest number of logits of a row.
  std::size_t most(std::size_t rows) const {
    return count + (rows ? std::size_t(*std::max_element(lengths, lengths + rows)) : 0);
  }
};

// Returns the dot products of queries [lanes, head_dim] with one key.
template <class Lanes, class T>
[[gnu::always_inline]] inline Lanes products(const float *queries, const T *key,
                                             std::size_t head_dim) {
  constexpr std::size_t lanes = lanes_of<Lanes>;
  Values sums[lanes] = {};
  for (std::size_t i = 0; i < head_dim; i += kValues) {
    const Values values = values_at(key + i);
    for (std::size_t l = 0; l < lanes; ++l)
      sums[l] += values_at(queries + l * head_dim + i) * values;
  }
  float each[lanes];
  for (std::size_t l = 0; l < lanes; ++l) each[l] = sum(sums[l]);
  return load<Lanes>(each);
}

template <class Lanes, class T>
[[gnu::always_inline]] inline Lanes log_sums_of(const Seen &seen, std::size_t row,
                                                std::size_t kv_head, const float *queries,
                                                float *logits) {
  const std::size_t from = kv_head * seen.head_dim;
  Lanes highest = all<Lanes>(-INFINITY);
  float *at = logits;
  const auto see = [&](const T *key) __attribute__((always_inline)) {
    const Lanes logit = products<Lanes>(queries, key, seen.head_dim);
    highest = larger(logit, highest);
    store(logit, at);
    at += lanes_of<Lanes>;
  };
  const T *keys = static_cast<const T *>(seen.near.keys) + from;
  for (std::size_t i = 0; i < seen.count; ++i) see(keys + i * seen.near.stride);
  keys = static_cast<const T *>(seen.own.keys) + from;
  const std::int64_t *slots = seen.slots + seen.starts[row], *end = slots + seen.lengths[row];
  for (; slots < end; ++slots) see(keys + std::size_t(*slots) * seen.own.stride);
  if (at == logits) return highest;
  float each[lanes_of<Lanes>], top[lanes_of<Lanes>];
  store(exponentials(logits, std::size_t(at - logits) / lanes_of<Lanes>, highest), each);
  store(highest, top);
  for (std::size_t l = 0; l < lanes_of<Lanes>; ++l) top[l] += std::log(each[l]);
  return load<Lanes>(top);
}

// Returns the log-sum-exp for the scaled queries [lanes, head_dim] of one row and KV head; minus
// infinity if the row sees no keys. `logits` is scratch memory for the logits of the row:
// [seen.most(..), lanes].
template <class Lanes>
[[gnu::always_inline]] inline Lanes log_sums(const Seen &seen, std::size_t row,
                                             std::size_t kv_head, const float *queries,
                                             float *logits) {
  return seen.bfloat16
             ? log_sums_of<Lanes, std::uint16_t>(seen, row, kv_head, queries, logits)
             : log_sums_of<Lanes, float>(seen, row, kv_head, queries, logits);
}

}  // namespace sgl_ext
