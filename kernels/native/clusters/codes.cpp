#include "codes.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "exponentials.h"
#include "openmp.h"

namespace sgl_ext::codes {
namespace {

// Returns the largest logit.
template <std::size_t subspaces>
inline float look_up(const std::uint8_t *codes, std::size_t entries, std::size_t all,
                     const float *tables, float *logits) {
  const std::size_t width = subspaces ? subspaces : all;
  float highest = -INFINITY;
  for (std::size_t e = 0; e < entries; ++e) {
    float sum = 0.0f;
    for (std::size_t s = 0; s < width; ++s) sum += tables[s * centroids + codes[e * width + s]];
    logits[e] = sum;
    highest = std::max(highest, sum);
  }
  return highest;
}

SGL_EXT_CLONES
float logits_of(const Shape &shape, const std::uint8_t *codes, const float *tables,
                float *logits) {
  switch (shape.subspaces) {  // the usual numbers are unrolled
    case 4: return look_up<4>(codes, shape.entries, 4, tables, logits);
    case 8: return look_up<8>(codes, shape.entries, 8, tables, logits);
    default: return look_up<0>(codes, shape.entries, shape.subspaces, tables, logits);
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

// The logits of a head's centroids, [subspaces, centroids]; what the mean adds to all of them is in
// the first subspace's.
SGL_EXT_CLONES
void tables_of(const Shape &shape, const Keys &keys, std::size_t kv_head, const float *query,
               float scale, float *turned, float *tables) {
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
  for (std::size_t s = 0; s < shape.subspaces; ++s) {
    float *table = tables + s * centroids;
    std::fill(table, table + centroids, s ? 0.0f : always);
    for (std::size_t i = s * width; i < (s + 1) * width; ++i) {
      const float q = turned[i];
      for (std::size_t c = 0; c < centroids; ++c) table[c] += q * wide(cents[i * centroids + c]);
    }
  }
}

struct Job {
  const Shape &shape;
  const Keys &keys;
  std::size_t count;
  const float *queries;
  float scale;
  const float *beside;
  float *parts;  // [queries, kv_heads, entries]
  std::atomic<std::size_t> next{0};
};

// The heads of one KV head at a time, whichever thread takes it: results do not depend on how many
// threads there are.
void work(void *data) {
  Job &job = *static_cast<Job *>(data);
  const Shape &shape = job.shape;
  const std::size_t group = shape.heads / shape.kv_heads;
  std::vector<float> logits(shape.entries), turned(shape.head_dim);
  std::vector<float> tables(shape.subspaces * centroids);
  for (std::size_t part; (part = job.next.fetch_add(1)) < job.count * shape.kv_heads;) {
    const std::size_t kv_head = part % shape.kv_heads;
    float *out = job.parts + part * shape.entries;
    std::fill(out, out + shape.entries, 0.0f);
    for (std::size_t h = 0; h < group; ++h) {
      const std::size_t at = part * group + h;
      tables_of(shape, job.keys, kv_head, job.queries + at * shape.head_dim, job.scale,
                turned.data(), tables.data());
      const float found =
          logits_of(shape, job.keys.codes + kv_head * shape.entries * shape.subspaces,
                    tables.data(), logits.data());
      const float highest = std::max(found, job.beside[at]);
      const float sum = exponentials_of(logits.data(), shape.entries, highest) +
                        std::exp(job.beside[at] - highest);
      add(logits.data(), shape.entries, 1.0f / sum, out);
    }
  }
}

}  // namespace

void mass(const Shape &shape, const Keys &keys, std::size_t count, const float *queries,
          float scale, const float *beside, int threads, float *out) {
  std::vector<float> parts(count * shape.kv_heads * shape.entries);
  Job job{shape, keys, count, queries, scale, beside, parts.data()};
  sgl_ext::parallel(count * shape.kv_heads > 1 ? threads : 1, work, &job);
  for (std::size_t q = 0; q < count; ++q) {
    float *row = out + q * shape.entries;
    std::fill(row, row + shape.entries, 0.0f);
    for (std::size_t k = 0; k < shape.kv_heads; ++k)
      add(parts.data() + (q * shape.kv_heads + k) * shape.entries, shape.entries, 1.0f, row);
  }
}

}  // namespace sgl_ext::codes
