#include "codes.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "codes_part.h"
#include "exponentials.h"
#include "openmp.h"

namespace sgl_ext::codes {
namespace {

// Number of additions below which one thread is used. They take about 0.1 ms; waking a sleeping
// thread takes half of that.
constexpr std::size_t kWorthThreads = std::size_t(1) << 18;

// Owner of the memory of a Room.
struct Memory {
  Memory(const Shape &shape, std::size_t lanes, std::size_t near)
      : queries(new float[shape.head_dim * lanes]),
        turned(new float[shape.head_dim * lanes]),
        tables(new float[shape.subspaces * centroids * lanes]),
        logits(new float[shape.entries * lanes]),
        near(new float[near * lanes]) {}

  Room room() const {
    return {queries.get(), turned.get(), tables.get(), logits.get(), near.get()};
  }

  const std::unique_ptr<float[]> queries, turned, tables, logits, near;
};

Add *supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return add_avx2;
#endif
  return add_portable;
}

Add *const add_part = supported();

SGLEXT_CLONES
void add(const float *values, std::size_t count, float *out) {
  for (std::size_t i = 0; i < count; ++i) out[i] += values[i];
}

// Each thread repeatedly claims the heads of one KV head for one row. Results do not depend on the
// number of threads.
void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  const Shape &shape = job.shape;
  const std::size_t group = shape.heads / shape.kv_heads;
  const std::size_t most = std::min(group, kMostLanes), parts = job.count * shape.kv_heads;
  std::size_t at = job.next.fetch_add(1);
  if (at >= parts) return;  // there are only as many rooms as parts
  const Room &room = job.rooms[job.used.fetch_add(1)];
  for (; at < parts; at = job.next.fetch_add(1)) {
    float *out = job.parts + at * shape.entries;
    std::fill(out, out + shape.entries, 0.0f);
    for (std::size_t first = 0; first < group; first += most) {
      const Part part{job, at / shape.kv_heads, at % shape.kv_heads, at * group + first,
                      std::min(most, group - first), room};
      add_part(part, out);
    }
  }
}

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, const Seen *seen, int threads, float *out) {
  // Not initialised: each thread fills the parts that it claims.
  const std::unique_ptr<float[]> parts(new float[count * shape.kv_heads * shape.entries]);
  const std::size_t lookups = count * shape.kv_heads * shape.entries * shape.subspaces;
  const int most = lookups < kWorthThreads ? 1 : std::max(threads, 1);
  const std::size_t lanes = lanes_for(std::min(shape.heads / shape.kv_heads, kMostLanes));
  const std::size_t near = seen ? seen->most(count) : 0;
  // Allocated here, because the threads must not throw.
  std::vector<std::unique_ptr<Memory>> memories;
  std::vector<Room> rooms;
  for (std::size_t i = 0; i < std::min(std::size_t(most), count * shape.kv_heads); ++i) {
    memories.push_back(std::make_unique<Memory>(shape, lanes, near));
    rooms.push_back(memories.back()->room());
  }
  Job job{shape, keys, count, queries, scale, beside, seen, parts.get(), rooms.data()};
  sgl_ext::parallel(most, work, &job);
  for (std::size_t q = 0; q < count; ++q) {
    float *row = out + q * shape.entries;
    std::fill(row, row + shape.entries, 0.0f);
    for (std::size_t k = 0; k < shape.kv_heads; ++k)
      add(parts.get() + (q * shape.kv_heads + k) * shape.entries, shape.entries, row);
  }
}

}  // namespace

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, int threads, float *out) {
  mass(shape, keys, count, queries, scale, beside, nullptr, threads, out);
}

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const Seen &seen, const float *beside, int threads, float *out) {
  mass(shape, keys, count, queries, scale, beside, &seen, threads, out);
}

}  // namespace sgl_ext::codes
