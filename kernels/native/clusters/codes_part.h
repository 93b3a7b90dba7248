// Parts that the estimate of attention is computed in, and the functions that compute one.
#pragma once

#include <atomic>
#include <cstddef>

#include "codes.h"

namespace sgl_ext::codes {

constexpr std::size_t kMostLanes = 8;

// Scratch memory for the query heads of one KV head that are processed at once.
struct Room {
  float *queries;  // [lanes, head_dim]
  float *turned;   // [lanes, head_dim]
  float *tables;   // [subspaces, centroids, lanes]
  float *logits;   // [entries, lanes]
  float *near;     // [keys without codes, lanes]
};

struct Job {
  const Shape &shape;
  const Keys &keys;
  std::size_t count;
  const float *queries;
  float scale;
  const float *beside;  // null if `seen` has all keys without codes
  const Seen *seen;     // null if `beside` has them
  float *parts;  // [queries, kv_heads, entries]
  const Room *rooms;  // one for each thread that claims parts
  std::atomic<std::size_t> next{0}, used{0};  // part to claim, room to use
};

// Some query heads of one KV head, for one row. They share the codes and keys of the KV head. Their
// values are interleaved, one head per lane, so that a code costs one vector addition for all heads
// and a key is read once.
struct Part {
  const Job &job;
  std::size_t row;
  std::size_t kv_head;
  std::size_t first;  // index of the first head among the heads of all rows
  std::size_t heads;
  const Room &room;
};

// Returns the number of lanes for `heads` heads.
constexpr std::size_t lanes_for(std::size_t heads) {
  return heads == 1 ? 1 : heads <= 4 ? 4 : kMostLanes;
}

// Adds the attention of the heads to each entry to `out` [entries]; one function per instruction
// set, which the machine must have.
using Add = void(const Part &, float *out);
Add add_portable, add_avx2;

}  // namespace sgl_ext::codes
