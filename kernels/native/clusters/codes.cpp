#include "codes.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "openmp.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// One clone per instruction set, chosen when the module is loaded.
#define SGL_EXT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SGL_EXT_CLONES
#endif

namespace sgl_ext::codes {
namespace {

// exp(x) for x <= 0, within 2e-7 of it; 0 below -87.
inline float exp_of(float x) {
  const float scaled = std::max(x, -87.0f) * 1.44269504f;
  const float whole = std::floor(scaled);
  const float rest = scaled - whole;  // 2^rest as a polynomial on [0, 1)
  float power = 1.8775767e-3f;
  power = power * rest + 8.9893397e-3f;
  power = power * rest + 5.5826318e-2f;
  power = power * rest + 2.4015361e-1f;
  power = power * rest + 6.9315308e-1f;
  power = power * rest + 9.9999994e-1f;
  const std::int32_t exponent = (std::int32_t(whole) + 127) << 23;
  float two;
  std::memcpy(&two, &exponent, sizeof two);
  return x < -87.0f ? 0.0f : power * two;
}

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
float exponentials(float *values, std::size_t count, float highest) {
  float sum = 0.0f;
  for (std::size_t i = 0; i < count; ++i) values[i] = exp_of(values[i] - highest);
  for (std::size_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

SGL_EXT_CLONES
void add(const float *values, std::size_t count, float factor, float *out) {
  for (std::size_t i = 0; i < count; ++i) out[i] += values[i] * factor;
}

struct Job {
  const Shape &shape;
  const std::uint8_t *codes;
  std::size_t queries;
  const float *tables;
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
  std::vector<float> logits(shape.entries);
  for (std::size_t part; (part = job.next.fetch_add(1)) < job.queries * shape.kv_heads;) {
    const std::size_t kv_head = part % shape.kv_heads;
    float *out = job.parts + part * shape.entries;
    std::fill(out, out + shape.entries, 0.0f);
    for (std::size_t h = 0; h < group; ++h) {
      const std::size_t at = part * group + h;
      const float found =
          logits_of(shape, job.codes + kv_head * shape.entries * shape.subspaces,
                    job.tables + at * shape.subspaces * centroids, logits.data());
      const float highest = std::max(found, job.beside[at]);
      const float sum = exponentials(logits.data(), shape.entries, highest) +
                        std::exp(job.beside[at] - highest);
      add(logits.data(), shape.entries, 1.0f / sum, out);
    }
  }
}

}  // namespace

void mass(const Shape &shape, const std::uint8_t *codes, std::size_t queries, const float *tables,
          const float *beside, int threads, float *out) {
  std::vector<float> parts(queries * shape.kv_heads * shape.entries);
  Job job{shape, codes, queries, tables, beside, parts.data()};
  sgl_ext::parallel(queries * shape.kv_heads > 1 ? threads : 1, work, &job);
  for (std::size_t q = 0; q < queries; ++q) {
    float *row = out + q * shape.entries;
    std::fill(row, row + shape.entries, 0.0f);
    for (std::size_t k = 0; k < shape.kv_heads; ++k)
      add(parts.data() + (q * shape.kv_heads + k) * shape.entries, shape.entries, 1.0f, row);
  }
}

}  // namespace sgl_ext::codes
