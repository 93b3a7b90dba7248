// Decode: one query; all heads of a key are processed while its cache lines are in the cache.
#include "common.inl"

namespace {

constexpr int kDecodeTile = 64;          // keys per step of the online softmax
constexpr int kDecodeTileBytes = 65536;  // K and V of a tile; larger tokens get half a tile
constexpr int kPrefetchBytes = 12288;    // K and V that are prefetched ahead

static_assert(kDecodeTile % 32 == 0 && 16 % kWidth == 0, "");

template <class P>
struct DecodeScratch {
  int query_stride;
  typename P::Operand *query;    // [heads, query_stride]
  float *scores;                 // [heads, kDecodeTile]
  typename P::Operand *weights;  // [heads, kDecodeTile / kPack]
  float *rescale;                // [heads]
  float *state;

  DecodeScratch(Arena &arena, const Layer &layer, int heads)
      : query_stride(round_up(layer.head_dim / P::kPack, kWidth)),
        query(arena.take<typename P::Operand>(heads * query_stride)),
        scores(arena.take<float>(heads * kDecodeTile)),
        weights(arena.take<typename P::Operand>(heads * kDecodeTile / P::kPack)),
        rescale(arena.take<float>(heads)),
        state(arena.take<float>(State::floats(heads, layer.head_dim))) {}
};

// Computes the unscaled logits of 16 keys for `Heads` query heads of one KV head. `rows` are the
// addresses of the slots of the keys.
template <class P, int Heads>
inline void score(const typename P::Operand *query, int query_stride, const char *const *rows,
                  std::ptrdiff_t offset, int head_dim, float *scores) {
  constexpr int Keys = keys_per_step<Heads>();
  for (int first = 0; first < 16; first += Keys) {
    vf sums[Heads * Keys];
    for (int i = 0; i < Heads * Keys; ++i) sums[i] = splat(0);
    for (int d = 0; d < head_dim; d += kWidth * P::kPack) {
      vf q[Heads];
      for (int h = 0; h < Heads; ++h)
        q[h] = P::load_operands(query + h * query_stride + d / P::kPack);
      for (int k = 0; k < Keys; ++k) {
        const auto *key = reinterpret_cast<const typename P::Element *>(rows[first + k] + offset);
        const vf operands = P::gather_operands(key + d, head_dim - d);
        for (int h = 0; h < Heads; ++h)
          sums[h * Keys + k] = P::multiply_add(q[h], operands, sums[h * Keys + k]);
      }
    }
    store_totals<Heads, Keys>(sums, scores + first, kDecodeTile);
  }
}

// Rescales `Vectors` vectors of the rows of `Heads` heads and adds the weighted values of `count`
// keys to them.
template <class P, int Heads, int Vectors>
inline void weigh(const typename P::Operand *weights, const float *rescale,
                  const char *const *rows, std::ptrdiff_t offset, int count, float *acc,
                  int head_dim) {
  using T = typename P::Element;
  vf sums[Heads][Vectors];
  for (int h = 0; h < Heads; ++h)
    for (int v = 0; v < Vectors; ++v) sums[h][v] = splat(0);
  for (int k = 0; k < count; k += P::kPack) {
    vf x[Vectors];
    P::template load_values<Vectors>(reinterpret_cast<const T *>(rows[k] + offset),
                                     reinterpret_cast<const T *>(rows[k + P::kPack - 1] + offset),
                                     x);
    for (int h = 0; h < Heads; ++h) {
      const vf weight = P::broadcast(weights + (h * kDecodeTile + k) / P::kPack);
      for (int v = 0; v < Vectors; ++v) sums[h][v] = P::multiply_add(weight, x[v], sums[h][v]);
    }
  }
  for (int h = 0; h < Heads; ++h) {
    vf before[Vectors];
    P::template load_sums<Vectors>(acc + h * head_dim, before);
    for (int v = 0; v < Vectors; ++v) sums[h][v] = fma(splat(rescale[h]), before[v], sums[h][v]);
    P::template store_sums<Vectors>(acc + h * head_dim, sums[h]);
  }
}

template <class P>
class Decoder {
 public:
  using T = typename P::Element;

  Decoder(const Layer &layer, const Task &task, float *partial, char *scratch)
      : layer_(layer), task_(task), final_(!partial), arena_(scratch),
        scratch_(arena_, layer, task.heads),
        state_(State::at(partial ? partial : scratch_.state, task.heads)) {}

  void run() {
    const int head_dim = layer_.head_dim;
    gather_query<P>(layer_, task_, task_.heads, scratch_.query, scratch_.query_stride);
    state_.clear(task_.heads, head_dim);
    const int bytes = 2 * task_.heads / group_ * head_dim * int(sizeof(T));
    const int tile = kDecodeTile * bytes <= kDecodeTileBytes ? kDecodeTile : kDecodeTile / 2;
    const int distance = larger(4, smaller(tile, kPrefetchBytes / bytes));
    fetch_first(smaller(distance, task_.last_key - task_.first_key));
    for (int first = task_.first_key; first < task_.last_key; first += tile) {
      count_ = smaller(tile, task_.last_key - first);
      point(first, distance);
      logits();
      softmax();
      weighted_values();
    }
    if (!final_) return;
    for (int r = 0; r < task_.heads; ++r)
      write_row<T>(layer_, task_, r, state_.acc + r * head_dim, state_.max[r],
                   state_.sum[r]);
  }

 private:
  void fetch_first(int count) const {
    const int row = task_.heads / group_ * layer_.head_dim * int(sizeof(T));
    const std::ptrdiff_t offset = std::ptrdiff_t(task_.head / group_) * layer_.head_dim * sizeof(T);
    for (int k = task_.first_key; k < task_.first_key + count; ++k) {
      prefetch(at_slot(layer_.keys, task_.slots[k]) + offset, row);
      prefetch(at_slot(layer_.values, task_.slots[k]) + offset, row);
    }
  }

  // Entries past the end repeat the last slot: their logits are computed and ignored.
  void point(int first, int distance) {
    const int last = task_.last_key - 1;
    const int padded = round_up(count_, 16);
    for (int k = 0; k < padded; ++k) {
      const std::int32_t slot = task_.slots[smaller(first + k, last)];
      const std::int32_t ahead = task_.slots[smaller(first + k + distance, last)];
      keys_[k] = at_slot(layer_.keys, slot);
      values_[k] = at_slot(layer_.values, slot);
      keys_ahead_[k] = at_slot(layer_.keys, ahead);
      values_ahead_[k] = at_slot(layer_.values, ahead);
    }
  }

  void logits() {
    const int row = layer_.head_dim * int(sizeof(T));
    for (int first = 0; first < count_; first += 16) {
      for (int head = 0; head < task_.heads; head += group_) {
        const std::ptrdiff_t offset = std::ptrdiff_t((task_.head + head) / group_) * row;
        // In a block-major pool the K and V of a token are adjacent: one address translation.
        for (int k = first; k < first + 16; ++k) {
          prefetch(keys_ahead_[k] + offset, row);
          prefetch(values_ahead_[k] + offset, row);
        }
        for (int h = 0; h < group_; h += kHeadBlock) {
          const int of = head + h;
          const auto *query = scratch_.query + of * scratch_.query_stride;
          float *scores = scratch_.scores + of * kDecodeTile + first;
          score_block<kHeadBlock>(smaller(kHeadBlock, group_ - h), query, keys_ + first, offset,
                                  scores);
        }
      }
    }
  }

  template <int Heads>
  void score_block(int heads, const typename P::Operand *query, const char *const *rows,
                   std::ptrdiff_t offset, float *scores) {
    if constexpr (Heads > 1) {
      if (heads < Heads) return score_block<Heads - 1>(heads, query, rows, offset, scores);
    }
    score<P, Heads>(query, scratch_.query_stride, rows, offset, layer_.head_dim, scores);
  }

  void softmax() {
    const vf factor = splat(layer_.scale);
    const vf hidden = splat(-__builtin_inff());
    const int padded = round_up(count_, 2 * kWidth);
    for (int h = 0; h < task_.heads; ++h) {
      float *scores = scratch_.scores + h * kDecodeTile;
      vf top = hidden;
      for (int k = 0; k < padded; k += kWidth) {
        const vf logit = inside(mul(load(scores + k), factor), 0, count_ - k, hidden);
        store(scores + k, logit);
        top = max(top, logit);
      }
      const float old = state_.max[h];
      const float peak = largest(top);
      const float now = peak > old ? peak : old;
      vf sum = splat(0);
      auto *out = scratch_.weights + h * kDecodeTile / P::kPack;
      for (int k = 0; k < padded; k += 2 * kWidth) {
        const vf low = exp_of<P::kExpDegree>(sub(load(scores + k), splat(now)));
        const vf high = exp_of<P::kExpDegree>(sub(load(scores + k + kWidth), splat(now)));
        sum = P::store_weights(out + k / P::kPack, low, high, sum);
      }
      const float rescale = first(exp_of<6>(splat(old - now)));
      scratch_.rescale[h] = rescale;
      state_.max[h] = now;
      state_.sum[h] = state_.sum[h] * rescale + total(sum);
    }
  }

  void weighted_values() {
    const int blocks = (group_ + kHeadBlock - 1) / kHeadBlock;
    for (int head = 0; head < task_.heads; head += group_) {
      const std::ptrdiff_t row =
          std::ptrdiff_t((task_.head + head) / group_) * layer_.head_dim * sizeof(T);
      for (int block = 0; block < blocks; ++block) {
        const int h = head + block * kHeadBlock;
        const int heads = smaller(kHeadBlock, head + group_ - h);
        for (int d = 0; d < layer_.head_dim; d += kGroup) {
          const int vectors = smaller(kGroup, layer_.head_dim - d) / kWidth;
          weigh_block<kHeadBlock, kGemmVectors>(heads, vectors, h, d, row + d * sizeof(T));
        }
      }
    }
  }

  template <int Heads, int Vectors>
  void weigh_block(int heads, int vectors, int head, int d, std::ptrdiff_t offset) {
    if constexpr (Heads > 1) {
      if (heads < Heads) return weigh_block<Heads - 1, Vectors>(heads, vectors, head, d, offset);
    }
    if constexpr (Vectors > 1) {
      if (vectors < Vectors)
        return weigh_block<Heads, Vectors - 1>(heads, vectors, head, d, offset);
    }
    weigh<P, Heads, Vectors>(scratch_.weights + head * kDecodeTile / P::kPack,
                             scratch_.rescale + head, values_, offset, count_,
                             state_.acc + head * layer_.head_dim + d, layer_.head_dim);
  }

  const Layer &layer_;
  const Task &task_;
  const bool final_;
  const int group_ = layer_.heads / layer_.kv_heads;
  Arena arena_;
  DecodeScratch<P> scratch_;
  State state_;
  int count_ = 0;  // keys of the current tile
  const char *keys_[kDecodeTile];  // addresses of the tile's slots; *_ahead_: `distance` later
  const char *values_[kDecodeTile];
  const char *keys_ahead_[kDecodeTile];
  const char *values_ahead_[kDecodeTile];
};

template <class P>
void decode(const Layer &layer, const Task &task, float *partial, char *scratch) {
  Decoder<P>(layer, task, partial, scratch).run();
}

}  // namespace
