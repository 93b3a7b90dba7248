#include "codes.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "exponentials.h"
#include "openmp.h"

namespace sgl_ext::codes {
namespace {

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
constexpr std::size_t kMostLanes = 8;
// Additions, about a tenth of a millisecond; to wake a thread that sleeps takes half of that.
constexpr std::size_t kWorthThreads = std::size_t(1) << 18;

// Heads of one KV head share its codes: the tables of some lie side by side, so that one code
// costs one addition for all of them. Writes logits [heads, entries], and each head's largest.
template <class Lanes, std::size_t subspaces>
[[gnu::always_inline]] inline void look_up(const std::uint8_t *codes, std::size_t entries,
                                           std::size_t all, std::size_t heads, const float *tables,
                                           float *logits, float *highest) {
  constexpr std::size_t lanes = sizeof(Lanes) / sizeof(float);
  const std::size_t width = subspaces ? subspaces : all;
  float each[lanes];
  std::fill(each, each + lanes, -INFINITY);
  Lanes most;
  std::memcpy(&most, each, sizeof most);
  for (std::size_t e = 0; e < entries; ++e) {
    Lanes sum{};
    for (std::size_t s = 0; s < width; ++s) {
      Lanes one;
      std::memcpy(&one, tables + (s * centroids + codes[e * width + s]) * lanes, sizeof one);
      sum += one;
    }
    most = sum > most ? sum : most;
    std::memcpy(each, &sum, sizeof sum);
    for (std::size_t l = 0; l < heads; ++l) logits[l * entries + e] = each[l];
  }
  std::memcpy(each, &most, sizeof most);
  std::copy(each, each + heads, highest);
}

template <class Lanes>
[[gnu::always_inline]] inline void look_up(const Shape &shape, const std::uint8_t *codes,
                                           std::size_t heads, const float *tables, float *logits,
                                           float *highest) {
  const std::size_t entries = shape.entries, all = shape.subspaces;
  switch (all) {  // the usual numbers are unrolled
    case 4: return look_up<Lanes, 4>(codes, entries, all, heads, tables, logits, highest);
    case 8: return look_up<Lanes, 8>(codes, entries, all, heads, tables, logits, highest);
    default: return look_up<Lanes, 0>(codes, entries, all, heads, tables, logits, highest);
  }
}

// Tables that lie side by side, for so many heads.
std::size_t lanes_of(std::size_t heads) { return heads == 1 ? 1 : heads <= 4 ? 4 : 8; }

SGL_EXT_CLONES
void logits_of(const Shape &shape, const std::uint8_t *codes, std::size_t heads,
               const float *tables, float *logits, float *highest) {
  switch (lanes_of(heads)) {
    case 1: return look_up<float>(shape, codes, heads, tables, logits, highest);
    case 4: return look_up<Four>(shape, codes, heads, tables, logits, highest);
    default: return look_up<Eight>(shape, codes, heads, tables, logits, highest);
  }
}

SGL_EXT_CLONES
float exponentials_of(float *values, std::size_t count, float highest) {
  return exponentials(values, count, highest);
}

SGL_EXT_CLONES
void add(const float *values, std::size_t count, float factor, float *out) {
  for (std::size_t i = 0; i < count; ++i) out[i] += values[i] * factor;
}

// The logits of a head's centroids, [subspaces, centroids, lanes], into one lane; what the mean adds
// to all of them is in the first subspace's.
SGL_EXT_CLONES
void tables_of(const Shape &shape, const Keys &keys, std::size_t kv_head, const float *query,
               float scale, float *turned, float *tables, std::size_t lanes) {
  const std::size_t dim = shape.head_dim, width = dim / shape.subspaces;
  const float *projection = keys.projection + kv_head * dim * dim;
  const float *mean = keys.mean + kv_head * dim;
  const std::uint16_t *cents = keys.centroids + kv_head * dim * centroids;
  std::fill(turned, turned + dim, 0.0f);
  float always = 0.0f;
  for (std::size_t i = 0; i < dim; ++i) {
    const float q = query[i] * scale;
    always += q * mean[i];
    for (std::size_t j = 0; j < dim; ++j) turned[j] += q * projection[i * dim + j];
  }
  float table[centroids];
  for (std::size_t s = 0; s < shape.subspaces; ++s) {
    std::fill(table, table + centroids, s ? 0.0f : always);
    for (std::size_t i = s * width; i < (s + 1) * width; ++i) {
      const float q = turned[i];
      for (std::size_t c = 0; c < centroids; ++c) table[c] += q * wide(cents[i * centroids + c]);
    }
    float *into = tables + s * centroids * lanes;
    for (std::size_t c = 0; c < centroids; ++c) into[c * lanes] = table[c];
  }
}

struct Job {
  const Shape &shape;
  const Keys &keys;
  std::size_t count;
  const float *queries;
  float scale;
  const float *beside;  // or, where there is none:
  const Seen *seen;
  float *parts;  // [queries, kv_heads, entries]
  std::atomic<std::size_t> next{0};
};

// The heads of one KV head at a time, whichever thread takes it: results do not depend on how many
// threads there are.
void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  const Shape &shape = job.shape;
  const std::size_t group = shape.heads / shape.kv_heads;
  const std::size_t most = std::min(group, kMostLanes), parts = job.count * shape.kv_heads;
  std::size_t part = job.next.fetch_add(1);
  if (part >= parts) return;  // before memory is taken: threads may be many, and parts few
  std::vector<float> logits(most * shape.entries), turned(shape.head_dim);
  std::vector<float> tables(shape.subspaces * centroids * lanes_of(most));
  std::vector<float> near(job.seen ? job.seen->most(job.count) : 0);
  float highest[kMostLanes];
  for (; part < parts; part = job.next.fetch_add(1)) {
    const std::size_t kv_head = part % shape.kv_heads, row = part / shape.kv_heads;
    float *out = job.parts + part * shape.entries;
    std::fill(out, out + shape.entries, 0.0f);
    for (std::size_t first = 0; first < group; first += most) {
      const std::size_t heads = std::min(most, group - first), lanes = lanes_of(heads);
      const std::size_t at = part * group + first;
      for (std::size_t h = 0; h < heads; ++h)
        tables_of(shape, job.keys, kv_head, job.queries + (at + h) * shape.head_dim, job.scale,
                  turned.data(), tables.data() + h, lanes);
      logits_of(shape, job.keys.codes + kv_head * shape.entries * shape.subspaces, heads,
                tables.data(), logits.data(), highest);
      for (std::size_t h = 0; h < heads; ++h) {
        float *mine = logits.data() + h * shape.entries;
        const float beside =
            job.seen ? log_sum(*job.seen, row, kv_head, job.queries + (at + h) * shape.head_dim,
                               job.scale, near.data())
                     : job.beside[at + h];
        const float top = std::max(highest[h], beside);
        const float sum = exponentials_of(mine, shape.entries, top) + std::exp(beside - top);
        add(mine, shape.entries, 1.0f / sum, out);
      }
    }
  }
}

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, const Seen *seen, int threads, float *out) {
  // Not initialised: every thread fills what it has taken.
  const std::unique_ptr<float[]> parts(new float[count * shape.kv_heads * shape.entries]);
  Job job{shape, keys, count, queries, scale, beside, seen, parts.get()};
  const std::size_t lookups = count * shape.kv_heads * shape.entries * shape.subspaces;
  sgl_ext::parallel(lookups < kWorthThreads ? 1 : threads, work, &job);
  for (std::size_t q = 0; q < count; ++q) {
    float *row = out + q * shape.entries;
    std::fill(row, row + shape.entries, 0.0f);
    for (std::size_t k = 0; k < shape.kv_heads; ++k)
      add(parts.get() + (q * shape.kv_heads + k) * shape.entries, shape.entries, 1.0f, row);
  }
}

}  // namespace

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, int threads, float *out) {
  mass(shape, keys, count, queries, scale, beside, nullptr, threads, out);
}

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const Seen &beside, int threads, float *out) {
  mass(shape, keys, count, queries, scale, nullptr, &beside, threads, out);
}

}  // namespace sgl_ext::codes
