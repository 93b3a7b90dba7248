// Extend: many queries of one KV head, computed as matrix products over packed tiles of keys.
#include "common.inl"

namespace {

constexpr int kTile = 128;  // keys that are packed at once
constexpr int kDepth = 64;  // operands of a logit that are accumulated in one pass

static_assert(kTile % kGroup == 0 && kGroup % (2 * kWidth) == 0, "");

// Computes c[r, :] = c[r, :] * rescale[r] + a[r, :] b for Rows rows and Vectors vectors of columns.
// If Rescaled is false, the previous contents of c are ignored. Strides are in elements of their
// array.
template <class P, bool Rescaled, int Rows, int Vectors>
inline void product_block(const typename P::Operand *a, int a_stride, const typename P::Operand *b,
                          int b_stride, int depth, const float *rescale, float *c, int c_stride) {
  vf sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) sums[r][v] = splat(0);
  for (int d = 0; d < depth; ++d) {
    vf column[Vectors];
    for (int v = 0; v < Vectors; ++v) column[v] = P::load_operands(b + v * kWidth);
    for (int r = 0; r < Rows; ++r) {
      const vf x = P::broadcast(a + r * a_stride + d);
      for (int v = 0; v < Vectors; ++v) sums[r][v] = P::multiply_add(x, column[v], sums[r][v]);
    }
    b += b_stride;
  }
  // c is added last: a sum of partial sums has a smaller rounding error than one long sum.
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      float *out = c + r * c_stride + v * kWidth;
      store(out, Rescaled ? fma(splat(rescale[r]), load(out), sums[r][v]) : sums[r][v]);
    }
  }
}

template <class P, bool Rescaled, int Rows, int Vectors>
inline void product_rest(int rows, const typename P::Operand *a, int a_stride,
                         const typename P::Operand *b, int b_stride, int depth,
                         const float *rescale, float *c, int c_stride) {
  if constexpr (Rows > 0) {
    if (rows < Rows)
      return product_rest<P, Rescaled, Rows - 1, Vectors>(rows, a, a_stride, b, b_stride, depth,
                                                          rescale, c, c_stride);
    product_block<P, Rescaled, Rows, Vectors>(a, a_stride, b, b_stride, depth, rescale, c,
                                              c_stride);
  }
}

template <class P, bool Rescaled, int Vectors>
void product(int rows, int vectors, const typename P::Operand *a, int a_stride,
             const typename P::Operand *b, int b_stride, int depth, const float *rescale, float *c,
             int c_stride) {
  if constexpr (Vectors > 1) {
    if (vectors < Vectors)
      return product<P, Rescaled, Vectors - 1>(rows, vectors, a, a_stride, b, b_stride, depth,
                                               rescale, c, c_stride);
  }
  for (; rows >= kGemmRows; rows -= kGemmRows) {
    product_block<P, Rescaled, kGemmRows, Vectors>(a, a_stride, b, b_stride, depth, rescale, c,
                                                   c_stride);
    a += kGemmRows * a_stride;
    c += kGemmRows * c_stride;
    rescale += kGemmRows;
  }
  product_rest<P, Rescaled, kGemmRows - 1, Vectors>(rows, a, a_stride, b, b_stride, depth, rescale,
                                                    c, c_stride);
}

// Matrix products of one task. An instruction set with matrix registers specialises it: rows are
// then read, and lines of `scores` written, up to the end of the row block.
template <class P>
struct Multiplier {
  template <bool Rescaled>
  void multiply(int rows, int vectors, const typename P::Operand *a, int a_stride,
                const typename P::Operand *b, int b_stride, int depth, const float *rescale,
                float *c, int c_stride) const {
    product<P, Rescaled, kGemmVectors>(rows, vectors, a, a_stride, b, b_stride, depth, rescale, c,
                                       c_stride);
  }
};

template <class P>
struct ExtendScratch {
  using Operand = typename P::Operand;
  Operand *query;             // [rows, rounded up to kRowBlock, head_dim / kPack]
  Operand *keys;              // [kTile / kGroup, head_dim / kPack, kGroup]
  Operand *values;            // [kTile / kPack, head_dim]
  float *scores;              // [kRowBlock, kTile]
  Operand *weights;           // [kRowBlock, kTile / kPack]
  float *rescale;             // [kRowBlock]
  float *ones;                // [kRowBlock]
  typename P::Element *zeros;  // [head_dim]: replaces the keys past the last one
  float *state;

  ExtendScratch(Arena &arena, const Layer &layer, int rows)
      : query(arena.take<Operand>(std::size_t(round_up(rows, P::kRowBlock)) * layer.head_dim /
                                  P::kPack)),
        keys(arena.take<Operand>(kTile * layer.head_dim / P::kPack)),
        values(arena.take<Operand>(kTile * layer.head_dim / P::kPack)),
        scores(arena.take<float>(P::kRowBlock * kTile)),
        weights(arena.take<Operand>(P::kRowBlock * kTile / P::kPack)),
        rescale(arena.take<float>(P::kRowBlock)),
        ones(arena.take<float>(P::kRowBlock)),
        zeros(arena.take<typename P::Element>(layer.head_dim)),
        state(arena.take<float>(State::floats(rows, layer.head_dim))) {}
};

template <class P>
class Extender {
 public:
  using T = typename P::Element;

  Extender(const Layer &layer, const Task &task, float *partial, char *scratch)
      : layer_(layer), task_(task), final_(!partial), rows_(task.queries * task.heads),
        arena_(scratch), scratch_(arena_, layer, rows_),
        state_(State::at(partial ? partial : scratch_.state, rows_)) {}

  void run() {
    const int head_dim = layer_.head_dim;
    gather_query<P>(layer_, task_, rows_, scratch_.query, depth_);
    state_.clear(rows_, head_dim);
    for (int r = 0; r < P::kRowBlock; ++r) scratch_.ones[r] = 1;
    std::memset(static_cast<void *>(scratch_.zeros), 0, head_dim * sizeof(T));
    for (first_ = task_.first_key; first_ < task_.last_key; first_ += kTile) {
      count_ = smaller(kTile, task_.last_key - first_);
      pack();
      for (int row = 0; row < rows_; row += P::kRowBlock)
        attend(row, smaller(P::kRowBlock, rows_ - row));
    }
    if (!final_) return;
    for (int r = 0; r < rows_; ++r)
      write_row<T>(layer_, task_, r, state_.acc + std::size_t(r) * head_dim, state_.max[r],
                   state_.sum[r]);
  }

 private:
  void pack() {
    const T *rows[kTile];
    const int padded = round_up(count_, kGroup);
    point(rows, padded, layer_.keys);
    const int operands = kWidth * P::kPack;
    for (int k = 0; k < padded; k += kWidth) {
      typename P::Operand *out = scratch_.keys + k / kGroup * depth_ * kGroup + k % kGroup;
      for (int d = 0; d < layer_.head_dim; d += operands) {
        vf block[kWidth];
        for (int i = 0; i < kWidth; ++i)
          block[i] = P::gather_operands(rows[k + i] + d, layer_.head_dim - d);
        transpose(block);
        const int used = smaller(kWidth, (layer_.head_dim - d) / P::kPack);
        for (int i = 0; i < used; ++i)
          P::store_operands(out + (d / P::kPack + i) * kGroup, block[i]);
      }
    }
    point(rows, padded, layer_.values);
    for (int k = 0; k < padded; k += 2)
      P::pack_values(rows[k], rows[k + 1], scratch_.values + k / P::kPack * layer_.head_dim,
                     layer_.head_dim);
  }

  void point(const T **rows, int padded, const Pool &pool) const {
    const int head = task_.head / task_.heads * layer_.head_dim;
    const std::int32_t *slots = task_.slots + first_;
    for (int k = 0; k < count_; ++k)
      rows[k] = reinterpret_cast<const T *>(at_slot(pool, slots[k])) + head;
    for (int k = count_; k < padded; ++k) rows[k] = scratch_.zeros;
  }

  // Prefetches K and V of the keys [from, to) of the next tile. The prefetches are spread over the
  // computation of the current tile: a core without room for further outstanding fetches stalls.
  void fetch_next_tile(int from, int to) const {
    const std::int32_t *slots = task_.slots + first_ + kTile;
    const int end = smaller(to, task_.last_key - first_ - kTile);
    const int row = layer_.head_dim * int(sizeof(T));
    const std::ptrdiff_t offset = std::ptrdiff_t(task_.head / task_.heads) * row;
    for (int k = from; k < end; ++k) {
      prefetch(at_slot(layer_.keys, slots[k]) + offset, row);
      prefetch(at_slot(layer_.values, slots[k]) + offset, row);
    }
  }

  int position(int row) const { return task_.positions[row / task_.heads]; }

  void attend(int row, int rows) {
    const int low = position(row) - layer_.window;
    const int high = position(row + rows - 1) + 1;
    if (high <= first_ || low >= first_ + count_) return;  // all keys are masked
    const int head_dim = layer_.head_dim;
    const int columns = round_up(smaller(high - first_, count_), kGroup);
    const auto *query = scratch_.query + row * depth_;
    for (int k = 0; k < columns; k += kGroup) {
      const auto *keys = scratch_.keys + k * depth_;
      float *scores = scratch_.scores + k;
      multiplier_.template multiply<false>(rows, kGemmVectors, query, depth_, keys, kGroup,
                                           smaller(depth_, kDepth), scratch_.ones, scores, kTile);
      for (int d = kDepth; d < depth_; d += kDepth)
        multiplier_.template multiply<true>(rows, kGemmVectors, query + d, depth_,
                                            keys + d * kGroup, kGroup,
                                            smaller(depth_ - d, kDepth), scratch_.ones, scores,
                                            kTile);
    }
    for (int r = 0; r < rows; ++r) {
      fetch_next_tile(kTile * (row + r) / rows_, kTile * (row + r + 1) / rows_);
      softmax(row + r, r, columns);
    }
    float *acc = state_.acc + std::size_t(row) * head_dim;
    for (int d = 0; d < head_dim; d += kGroup)
      multiplier_.template multiply<true>(rows, smaller(kGroup, head_dim - d) / kWidth,
                                          scratch_.weights, kTile / P::kPack,
                                          scratch_.values + d, head_dim, columns / P::kPack,
                                          scratch_.rescale, acc + d, head_dim);
  }

  // Computes the weights of row `row` from its logits in line `line` of the scores.
  void softmax(int row, int line, int columns) {
    const int low = larger(position(row) - layer_.window - first_, 0);
    const int high = smaller(position(row) + 1 - first_, count_);
    if (low == 0 && high >= columns) {
      softmax<false>(row, line, columns, low, high);
    } else {
      softmax<true>(row, line, columns, low, high);
    }
  }

  template <bool Masked>
  void softmax(int row, int line, int columns, int low, int high) {
    const float *scores = scratch_.scores + line * kTile;
    const float factor = layer_.scale;
    const vf hidden = splat(-__builtin_inff());
    vf tops[2] = {hidden, hidden};
    for (int k = 0; k < columns; k += 2 * kWidth) {
      for (int i = 0; i < 2; ++i) {
        vf logit = load(scores + k + i * kWidth);
        const int at = k + i * kWidth;
        if (Masked) logit = inside(logit, low - at, high - at, hidden);
        tops[i] = max(tops[i], logit);
      }
    }
    const float old = state_.max[row];
    const float peak = largest(max(tops[0], tops[1])) * factor;
    const float now = peak > old ? peak : old;
    vf sum = splat(0);
    auto *out = scratch_.weights + line * (kTile / P::kPack);
    for (int k = 0; k < columns; k += 2 * kWidth) {
      vf weight[2];
      for (int i = 0; i < 2; ++i) {
        const vf logit = mul(load(scores + k + i * kWidth), splat(factor));
        weight[i] = exp_of<P::kExpDegree>(sub(logit, splat(now)));
        const int at = k + i * kWidth;
        if (Masked) weight[i] = inside(weight[i], low - at, high - at, splat(0));
      }
      sum = P::store_weights(out + k / P::kPack, weight[0], weight[1], sum);
    }
    const float rescale = first(exp_of<6>(splat(old - now)));
    scratch_.rescale[line] = rescale;
    state_.max[row] = now;
    state_.sum[row] = state_.sum[row] * rescale + total(sum);
  }

  const Layer &layer_;
  const Task &task_;
  const bool final_;
  const int rows_;
  const int depth_ = layer_.head_dim / P::kPack;
  Multiplier<P> multiplier_;
  Arena arena_;
  ExtendScratch<P> scratch_;
  State state_;
  int first_ = 0;  // first key of the current tile
  int count_ = 0;  // keys of the current tile
};

template <class P>
void extend(const Layer &layer, const Task &task, float *partial, char *scratch) {
  Extender<P>(layer, task, partial, scratch).run();
}

}  // namespace
