// Code shared by the kernels of one instruction set. It uses vector operations that the translation
// unit defines before it includes kernels.inl: vf, kWidth, splat, load, store, add, sub, mul, fma,
// max, inside, total, largest, first, nearest, scale_by_power, transpose, keys_per_step,
// store_totals and the sizes kGemmRows, kGemmVectors and kHeadBlock.
//
// Everything is in an anonymous namespace, and no template of the standard library is instantiated:
// the linker would keep only one copy of a shared inline function, possibly one with instructions
// that this machine does not support.
#pragma once

#include <cfloat>
#include <cstring>

#include "kernels.h"

namespace {

using sgl_ext::attention::Kernels;
using sgl_ext::attention::Layer;
using sgl_ext::attention::Pool;
using sgl_ext::attention::Task;

constexpr int kGroup = kGemmVectors * kWidth;  // keys or dimensions per register block

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// Returns e^x for x <= 0: exactly 1 at 0 and exactly 0 below -87.7, -inf included. A minimax
// polynomial approximates 2^f on [-0.5, 0.5] with a relative error of 2e-8 (degree 6) or 3e-6
// (degree 4).
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

// Products in fp32 for all element types.
template <class T>
struct WidenedProduct {
  using Element = T;
  using Operand = float;
  static constexpr int kPack = 1;       // elements of the summed dimension per operand
  static constexpr int kRowBlock = 24;  // query rows whose logits over a tile stay in the L1 cache
  static constexpr int kExpDegree = 6;

  static vf broadcast(const Operand *p) { return splat(*p); }
  static vf load_operands(const Operand *p) { return load(p); }
  static void store_operands(Operand *p, vf v) { store(p, v); }
  static vf multiply_add(vf a, vf b, vf sum) { return fma(a, b, sum); }
  // Loads the next kWidth operands of a row that has `count` elements left.
  static vf gather_operands(const Element *p, int) { return load(p); }
  static void pack_values(const Element *even, const Element *odd, Operand *out, int head_dim) {
    for (int d = 0; d < head_dim; d += kWidth) {
      store(out + d, load(even + d));
      store(out + head_dim + d, load(odd + d));
    }
  }
  // Loads the values of kPack consecutive keys. The order of the dimensions may differ from that in
  // memory; load_sums and store_sums convert sums to and from this order.
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
  // Stores the weights of 2 * kWidth keys as operands; returns `sum` plus these weights.
  static vf store_weights(Operand *out, vf low, vf high, vf sum) {
    store(out, low);
    store(out + kWidth, high);
    return add(sum, add(low, high));
  }
};

// Allocator of 64-byte aligned arrays in the scratch memory; only counts bytes if `base` is null.
class Arena {
 public:
  explicit Arena(char *base) : base_(reinterpret_cast<std::uintptr_t>(base)) {}
  template <class T>
  T *take(std::size_t count) {
    T *at = reinterpret_cast<T *>(base_ + used_);  // integers: null plus an offset is undefined
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  std::size_t used() const { return used_; }

 private:
  std::uintptr_t base_;
  std::size_t used_ = 0;
};

// Softmax state of some rows, in the layout that Kernels::decode documents.
struct State {
  float *max;
  float *sum;
  float *acc;

  static std::size_t floats(std::size_t rows, int head_dim) { return rows * (2 + head_dim); }
  static State at(float *base, int rows) { return {base, base + rows, base + 2 * rows}; }
  void clear(int rows, int head_dim) const {
    for (int r = 0; r < rows; ++r) {
      max[r] = -FLT_MAX;  // finite, so that the difference of two is never NaN
      sum[r] = 0;
    }
    std::memset(acc, 0, sizeof(float) * rows * head_dim);
  }
};

// Prefetches into the L2 cache: a core supports far fewer outstanding lines for L1 (prefetching
// into L2 makes reading slots 1.6 times faster on Zen 4).
inline void prefetch(const char *p, int bytes) {
  for (int offset = 0; offset < bytes; offset += 64) __builtin_prefetch(p + offset, 0, 2);
}

inline const char *at_slot(const Pool &pool, std::int32_t slot) {
  const bool far = slot >= pool.boundary;
  return (far ? pool.far : pool.near) + slot * (far ? pool.far_stride : pool.near_stride);
}

// Returns row `r` of the task in an array [tokens, heads, head_dim] of T.
template <class T>
inline T *row_of(char *base, std::ptrdiff_t stride, const Layer &layer, const Task &task, int r) {
  const std::int64_t token = task.token + r / task.heads;
  const int head = task.head + r % task.heads;
  return reinterpret_cast<T *>(base + token * stride) + head * layer.head_dim;
}

// Writes the result of row `r` from its state: `top` is the largest logit, see Kernels::decode.
template <class T>
void write_row(const Layer &layer, const Task &task, int r, const float *acc, float top,
               float sum) {
  if (layer.log_sums) {
    const std::int64_t token = task.token + r / task.heads;
    layer.log_sums[token * layer.heads + task.head + r % task.heads] = top + __builtin_logf(sum);
  }
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
