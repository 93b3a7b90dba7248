// What the kernels of one instruction set share, over the vector operations that its translation
// unit defines before including kernels.inl: vf, kWidth, splat, load, store, add, sub, mul, fma,
// max, inside, total, largest, first, nearest, scale_by_power, transpose, keys_per_step,
// store_totals and the sizes kGemmRows, kGemmVectors and kHeadBlock.
//
// Everything is in an anonymous namespace and nothing of the standard library is instantiated:
// the linker would keep one copy of a shared inline function, perhaps one that this machine
// cannot run.
#pragma once

#include <cfloat>
#include <cstring>

#include "kernels.h"

namespace {

using sgl_ext::attention::Kernels;
using sgl_ext::attention::Layer;
using sgl_ext::attention::Pool;
using sgl_ext::attention::Task;

constexpr int kGroup = kGemmVectors * kWidth;  // keys, or dimensions, of one register block

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// e^x for x <= 0, exactly 1 at 0 and exactly 0 below -88.1, -inf included. 2^f on [-0.5, 0.5] is a
// minimax polynomial, 2e-9 (degree 6) or 3e-6 (degree 4) off.
template <int Degree>
inline vf exp_of(vf x) {
  x = max(splat(-88.1f), x);
  const vf log2e = splat(1.4426950408889634f);
  const vf whole = nearest(mul(x, log2e));
  const vf f = fma(x, log2e, sub(splat(0), whole));
  vf y;
  if (Degree == 6) {
    y = fma(splat(0.00015353360504377633f), f, splat(0.0013398875016719103f));
    y = fma(y, f, splat(0.00961843691766262f));
    y = fma(y, f, splat(0.055503323674201965f));
    y = fma(y, f, splat(0.24022647738456726f));
    y = fma(y, f, splat(0.6931471824645996f));
  } else {
    y = fma(splat(0.009582851082086563f), f, splat(0.05590642988681793f));
    y = fma(y, f, splat(0.24024099111557007f));
    y = fma(y, f, splat(0.6931241750717163f));
  }
  return scale_by_power(fma(y, f, splat(1.0f)), whole);
}

// Products in fp32 whatever the elements.
template <class T>
struct WidenedProduct {
  using Element = T;
  using Operand = float;
  static constexpr int kPack = 1;  // elements of the summed dimension in one operand
  static constexpr int kExpDegree = 6;

  static vf broadcast(const Operand *p) { return splat(*p); }
  static vf load_operands(const Operand *p) { return load(p); }
  static void store_operands(Operand *p, vf v) { store(p, v); }
  static vf multiply_add(vf a, vf b, vf sum) { return fma(a, b, sum); }
  // The next kWidth operands of a row that has `count` more elements.
  static vf gather_operands(const Element *p, int) { return load(p); }
  static void pack_values(const Element *even, const Element *odd, Operand *out, int head_dim) {
    for (int d = 0; d < head_dim; d += kWidth) {
      store(out + d, load(even + d));
      store(out + head_dim + d, load(odd + d));
    }
  }
  // The values of kPack successive keys; their dimensions may be in another order than memory's,
  // the order that load_sums and store_sums give sums in.
  template <int Vectors>
  static void load_values(const Element *value, const Element *, vf *x) {
    for (int v = 0; v < Vectors; ++v) x[v] = load(value + v * kWidth);
  }
  template <int Vectors>
  static void load_sums(const float *p, vf *x) {
    for (int v = 0; v < Vectors; ++v) x[v] = load(p + v * kWidth);
  }
  template <int Vectors>
  static void store_sums(float *p, const vf *x) {
    for (int v = 0; v < Vectors; ++v) store(p + v * kWidth, x[v]);
  }
  // Writes the weights of 2 * kWidth keys as operands; returns `sum` with them.
  static vf store_weights(Operand *out, vf low, vf high, vf sum) {
    store(out, low);
    store(out + kWidth, high);
    return add(sum, add(low, high));
  }
};

// Takes 64-byte aligned arrays from the scratch memory; counts only, where that is null.
class Arena {
 public:
  explicit Arena(char *base) : base_(reinterpret_cast<std::uintptr_t>(base)) {}
  template <class T>
  T *take(std::size_t count) {
    T *at = reinterpret_cast<T *>(base_ + used_);  // an integer: null plus an offset is undefined
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  std::size_t used() const { return used_; }

 private:
  std::uintptr_t base_;
  std::size_t used_ = 0;
};

// The softmax state of some rows, as Kernels::decode describes it.
struct State {
  float *max;
  float *sum;
  float *acc;

  static std::size_t floats(std::size_t rows, int head_dim) { return rows * (2 + head_dim); }
  static State at(float *base, int rows) { return {base, base + rows, base + 2 * rows}; }
  void clear(int rows, int head_dim) const {
    for (int r = 0; r < rows; ++r) {
      max[r] = -FLT_MAX;  // finite, so that a difference of two is never NaN
      sum[r] = 0;
    }
    std::memset(acc, 0, sizeof(float) * rows * head_dim);
  }
};

// Into the L2 cache: of lines on their way to L1 a core keeps far fewer in flight (Zen 4 reads
// slots 1.6 times faster this way).
inline void prefetch(const char *p, int bytes) {
  for (int offset = 0; offset < bytes; offset += 64) __builtin_prefetch(p + offset, 0, 2);
}

inline const char *at_slot(const Pool &pool, std::int32_t slot) {
  const bool far = slot >= pool.boundary;
  return (far ? pool.far : pool.near) + slot * (far ? pool.far_stride : pool.near_stride);
}

// Row `r` of the task in an array [tokens, heads, head_dim] of T.
template <class T>
inline T *row_of(char *base, std::ptrdiff_t stride, const Layer &layer, const Task &task, int r) {
  const std::int64_t token = task.token + r / task.heads;
  const int head = task.head + r % task.heads;
  return reinterpret_cast<T *>(base + token * stride) + head * layer.head_dim;
}

template <class T>
void write_row(const Layer &layer, const Task &task, int r, const float *acc, float sum) {
  T *out = row_of<T>(layer.out, layer.out_stride, layer, task, r);
  // A sum of 0 means that every logit was -inf.
  const vf factor = splat(sum > 0 || sum != sum ? 1.0f / sum : 0.0f);
  for (int d = 0; d < layer.head_dim; d += kWidth) store(out + d, mul(load(acc + d), factor));
}

template <class P>
void gather_query(const Layer &layer, const Task &task, int rows, typename P::Operand *out,
                  int stride) {
  using T = typename P::Element;
  for (int r = 0; r < rows; ++r) {
    const T *query =
        row_of<const T>(const_cast<char *>(layer.query), layer.query_stride, layer, task, r);
    for (int d = 0; d < layer.head_dim; d += kWidth * P::kPack) {
      const int left = layer.head_dim - d;
      const vf operands = P::gather_operands(query + d, left);
      typename P::Operand *to = out + r * stride + d / P::kPack;
      if (stride - d / P::kPack >= kWidth) {
        P::store_operands(to, operands);
      } else {
        std::memcpy(to, query + d, left * sizeof(T));
      }
    }
  }
}

}  // namespace
