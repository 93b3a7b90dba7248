#include "codes.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "lanes.h"
#include "log_sum.h"
#include "openmp.h"

namespace sgl_ext::codes {
namespace {

constexpr std::size_t kMostLanes = 8;
// Number of additions below which one thread is used. They take about 0.1 ms; waking a sleeping
// thread takes half of that.
constexpr std::size_t kWorthThreads = std::size_t(1) << 18;

// Scratch memory for the query heads of one KV head that are processed at once.
struct Room {
  Room(const Shape &shape, std::size_t lanes, std::size_t near)
      : queries(new float[shape.head_dim * lanes]),
        turned(new float[shape.head_dim * lanes]),
        tables(new float[shape.subspaces * centroids * lanes]),
        logits(new float[shape.entries * lanes]),
        near(new float[near * lanes]) {}

  const std::unique_ptr<float[]> queries, turned, tables, logits, near;
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
  std::atomic<std::size_t> next{0};
};

// Returns log(exp(a) + exp(b)).
[[gnu::always_inline]] inline float log_sum(float a, float b) {
  const float top = std::max(a, b);
  return top == -INFINITY ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

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

// Computes the scaled queries [lanes, head_dim] and their projections; zero in unused lanes.
template <class Lanes>
[[gnu::always_inline]] inline void turn(const Part &part) {
  const std::size_t dim = part.job.shape.head_dim, all = lanes_of<Lanes> * dim;
  float *queries = part.room.queries.get(), *turned = part.room.turned.get();
  const float *given = part.job.queries + part.first * dim;
  for (std::size_t i = 0; i < part.heads * dim; ++i) queries[i] = given[i] * part.job.scale;
  std::fill(queries + part.heads * dim, queries + all, 0.0f);
  std::fill(turned, turned + all, 0.0f);
  const float *projection = part.job.keys.projection + part.kv_head * dim * dim;
  for (std::size_t h = 0; h < part.heads; ++h)
    for (std::size_t i = 0; i < dim; ++i) {
      const float q = queries[h * dim + i];
      for (std::size_t j = 0; j < dim; ++j) turned[h * dim + j] += q * projection[i * dim + j];
    }
}

// Computes the logits of the centroids [subspaces, centroids, lanes]. Those of the first subspace
// include the logit of the mean, which is common to all keys.
template <class Lanes>
[[gnu::always_inline]] inline void fill_tables(const Part &part) {
  constexpr std::size_t lanes = lanes_of<Lanes>, width = 16;
  const Shape &shape = part.job.shape;
  const std::size_t dim = shape.head_dim, own = dim / shape.subspaces;
  const float *queries = part.room.queries.get(), *turned = part.room.turned.get();
  const float *mean = part.job.keys.mean + part.kv_head * dim;
  const std::uint16_t *cents = part.job.keys.centroids + part.kv_head * dim * centroids;
  float *table = part.room.tables.get();
  float always[lanes] = {};
  for (std::size_t h = 0; h < part.heads; ++h)
    for (std::size_t i = 0; i < dim; ++i) always[h] += queries[h * dim + i] * mean[i];
  for (std::size_t s = 0; s < shape.subspaces; ++s, cents += own * centroids, turned += own)
    for (std::size_t c = 0; c < centroids; c += width, table += width * lanes) {
      Sixteen sums[lanes];
      for (std::size_t l = 0; l < lanes; ++l) sums[l] = all<Sixteen>(s ? 0.0f : always[l]);
      for (std::size_t i = 0; i < own; ++i) {
        const Sixteen values = sixteen(cents + i * centroids + c);
        for (std::size_t l = 0; l < lanes; ++l) sums[l] += turned[l * dim + i] * values;
      }
      float each[lanes][width];
      std::memcpy(each, sums, sizeof each);
      for (std::size_t i = 0; i < width; ++i)
        for (std::size_t l = 0; l < lanes; ++l) table[i * lanes + l] = each[l][i];
    }
}

// Computes the logits [entries, lanes]; returns the largest logit of each head.
template <class Lanes, std::size_t subspaces>
[[gnu::always_inline]] inline Lanes look_up(const Part &part) {
  constexpr std::size_t lanes = lanes_of<Lanes>;
  const Shape &shape = part.job.shape;
  const std::size_t width = subspaces ? subspaces : shape.subspaces;
  const std::uint8_t *code = part.job.keys.codes + part.kv_head * shape.entries * width;
  const float *tables = part.room.tables.get();
  float *logits = part.room.logits.get();
  Lanes highest = all<Lanes>(-INFINITY);
  for (std::size_t e = 0; e < shape.entries; ++e, code += width) {
    Lanes sum{};
    for (std::size_t s = 0; s < width; ++s)
      sum += load<Lanes>(tables + (s * centroids + code[s]) * lanes);
    highest = larger(sum, highest);
    store(sum, logits + e * lanes);
  }
  return highest;
}

template <class Lanes>
[[gnu::always_inline]] inline Lanes look_up(const Part &part) {
  switch (part.job.shape.subspaces) {  // the common numbers are unrolled
    case 4: return look_up<Lanes, 4>(part);
    case 8: return look_up<Lanes, 8>(part);
    default: return look_up<Lanes, 0>(part);
  }
}

// Adds the attention of the heads to each entry to `out` [entries].
template <class Lanes>
[[gnu::always_inline]] inline void add_mass(const Part &part, float *out) {
  constexpr std::size_t lanes = lanes_of<Lanes>;
  const std::size_t entries = part.job.shape.entries;
  float *logits = part.room.logits.get();
  turn<Lanes>(part);
  Lanes beside{};
  if (part.job.seen)
    beside = log_sums<Lanes>(*part.job.seen, part.row, part.kv_head, part.room.queries.get(),
                             part.room.near.get());
  if (part.job.beside) {
    float each[lanes] = {}, seen[lanes];
    std::copy_n(part.job.beside + part.first, part.heads, each);
    store(beside, seen);
    for (std::size_t l = 0; part.job.seen && l < part.heads; ++l) each[l] = log_sum(each[l], seen[l]);
    beside = load<Lanes>(each);
  }
  fill_tables<Lanes>(part);
  const Lanes highest = larger(beside, look_up<Lanes>(part));
  float factor[lanes], top[lanes], more[lanes];
  store(exponentials(logits, entries, highest), factor);
  store(highest, top);
  store(beside, more);
  for (std::size_t l = 0; l < lanes; ++l)
    factor[l] = l < part.heads ? 1.0f / (factor[l] + std::exp(more[l] - top[l])) : 0.0f;
  for (std::size_t e = 0; e < entries; ++e) {
    float sum = 0.0f;
    for (std::size_t l = 0; l < lanes; ++l) sum += logits[e * lanes + l] * factor[l];
    out[e] += sum;
  }
}

SGLEXT_CLONES void add_one(const Part &part, float *out) { add_mass<One>(part, out); }
SGLEXT_CLONES void add_four(const Part &part, float *out) { add_mass<Four>(part, out); }
SGLEXT_CLONES void add_eight(const Part &part, float *out) { add_mass<Eight>(part, out); }

SGLEXT_CLONES
void add(const float *values, std::size_t count, float *out) {
  for (std::size_t i = 0; i < count; ++i) out[i] += values[i];
}

// Returns the number of lanes for `heads` heads.
std::size_t lanes_for(std::size_t heads) { return heads == 1 ? 1 : heads <= 4 ? 4 : kMostLanes; }

// Each thread repeatedly claims the heads of one KV head for one row. Results do not depend on the
// number of threads.
void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  const Shape &shape = job.shape;
  const std::size_t group = shape.heads / shape.kv_heads;
  const std::size_t most = std::min(group, kMostLanes), parts = job.count * shape.kv_heads;
  std::size_t at = job.next.fetch_add(1);
  if (at >= parts) return;  // before the allocation: there may be more threads than parts
  const Room room(shape, lanes_for(most), job.seen ? job.seen->most(job.count) : 0);
  for (; at < parts; at = job.next.fetch_add(1)) {
    float *out = job.parts + at * shape.entries;
    std::fill(out, out + shape.entries, 0.0f);
    for (std::size_t first = 0; first < group; first += most) {
      const Part part{job, at / shape.kv_heads, at % shape.kv_heads, at * group + first,
                      std::min(most, group - first), room};
      switch (lanes_for(part.heads)) {
        case 1: add_one(part, out); break;
        case 4: add_four(part, out); break;
        default: add_eight(part, out);
      }
    }
  }
}

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, const Seen *seen, int threads, float *out) {
  // Not initialised: each thread fills the parts that it claims.
  const std::unique_ptr<float[]> parts(new float[count * shape.kv_heads * shape.entries]);
  Job job{shape, keys, count, queries, scale, beside, seen, parts.get()};
  const std::size_t lookups = count * shape.kv_heads * shape.entries * shape.subspaces;
  sgl_ext::parallel(lookups < kWorthThreads ? 1 : threads, work, &job);
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
