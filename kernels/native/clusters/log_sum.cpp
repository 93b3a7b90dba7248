#include "log_sum.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "exponentials.h"
#include "openmp.h"

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

struct Job {
  const LogSum &shape;
  const float *queries;
  std::size_t rows;
  Near near;
  std::size_t count;
  Near own;
  const std::int64_t *slots;
  const std::int64_t *lengths;
  float *out;
  std::size_t width;            // of a thread's logits
  std::vector<float> logits{};  // of all threads, whose body must not throw
  std::atomic<std::size_t> thread{0}, next{0};
};

void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  const LogSum &shape = job.shape;
  const std::size_t group = shape.heads / shape.kv_heads;
  float *logits = job.logits.data() + job.thread.fetch_add(1) * job.width;
  const auto head = shape.bfloat16 ? narrow_head : wide_head;
  for (std::size_t at; (at = job.next.fetch_add(1)) < job.rows * shape.heads;)
    job.out[at] = head(shape, job.queries + at * shape.head_dim, at % shape.heads / group, job.near,
                       job.count, job.own, job.slots,
                       std::size_t(job.lengths[at / shape.heads]), logits);
}

}  // namespace

void log_sum(const LogSum &shape, const float *queries, std::size_t rows, Near near,
             std::size_t count, Near own, const std::int64_t *slots, const std::int64_t *lengths,
             int threads, float *out) {
  if (!rows) return;
  const std::size_t longest = std::size_t(*std::max_element(lengths, lengths + rows));
  Job job{shape, queries, rows, near, count, own, slots, lengths, out, count + longest};
  threads = std::max(threads, 1);
  job.logits.resize(std::size_t(threads) * job.width);
  parallel(threads, work, &job);
}

}  // namespace sgl_ext
