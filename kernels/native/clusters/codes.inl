// Code of the functions in codes_part.h, compiled once per instruction set. It calls no function
// that the linker could merge with another unit's: that one may have instructions that this machine
// lacks. Functions of the included headers are always inlined.
#include <cmath>

#include "codes_part.h"
#include "lanes.h"
#include "log_sum.h"

namespace sgl_ext::codes {
namespace {

// Returns log(exp(a) + exp(b)).
[[gnu::always_inline]] inline float log_sum(float a, float b) {
  const float top = (a > b ? a : b);
  return top == -INFINITY ? top : top + std::log(std::exp(a - top) + std::exp(b - top));
}

// Computes the scaled queries [lanes, head_dim] and their projections; zero in unused lanes.
template <class Lanes>
[[gnu::always_inline]] inline void turn(const Part &part) {
  const std::size_t dim = part.job.shape.head_dim, all = lanes_of<Lanes> * dim;
  float *queries = part.room.queries, *turned = part.room.turned;
  const float *given = part.job.queries + part.first * dim;
  for (std::size_t i = 0; i < part.heads * dim; ++i) queries[i] = given[i] * part.job.scale;
  for (std::size_t i = part.heads * dim; i < all; ++i) queries[i] = 0.0f;
  for (std::size_t i = 0; i < all; ++i) turned[i] = 0.0f;
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
  constexpr std::size_t lanes = lanes_of<Lanes>, width = kValues;
  const Shape &shape = part.job.shape;
  const std::size_t dim = shape.head_dim, own = dim / shape.subspaces;
  const float *queries = part.room.queries, *turned = part.room.turned;
  const float *mean = part.job.keys.mean + part.kv_head * dim;
  const std::uint16_t *cents = part.job.keys.centroids + part.kv_head * dim * centroids;
  float *table = part.room.tables;
  float always[lanes] = {};
  for (std::size_t h = 0; h < part.heads; ++h)
    for (std::size_t i = 0; i < dim; ++i) always[h] += queries[h * dim + i] * mean[i];
  for (std::size_t s = 0; s < shape.subspaces; ++s, cents += own * centroids, turned += own)
    for (std::size_t c = 0; c < centroids; c += width, table += width * lanes) {
      Values sums[lanes];
      for (std::size_t l = 0; l < lanes; ++l) sums[l] = all<Values>(s ? 0.0f : always[l]);
      for (std::size_t i = 0; i < own; ++i) {
        const Values values = values_at(cents + i * centroids + c);
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
  const float *tables = part.room.tables;
  float *logits = part.room.logits;
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
  float *logits = part.room.logits;
  turn<Lanes>(part);
  Lanes beside{};
  if (part.job.seen)
    beside = log_sums<Lanes>(*part.job.seen, part.row, part.kv_head, part.room.queries,
                             part.room.near);
  if (part.job.beside) {
    float each[lanes] = {}, seen[lanes];
    for (std::size_t l = 0; l < part.heads; ++l) each[l] = part.job.beside[part.first + l];
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

}  // namespace

void SGLEXT_ADD(const Part &part, float *out) {
  switch (lanes_for(part.heads)) {
    case 1: return add_mass<One>(part, out);
    case 4: return add_mass<Four>(part, out);
    default: return add_mass<Eight>(part, out);
  }
}

}  // namespace sgl_ext::codes
