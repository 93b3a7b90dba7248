// Kernels of one instruction set; common.inl lists what must be defined before the inclusion.
#include "decode.inl"
#include "extend.inl"

namespace {

template <class T>
void merge(const Layer &layer, const Task &task, const float *partials, int count, char *scratch) {
  const int rows = task.queries * task.heads;
  const std::size_t size = State::floats(rows, layer.head_dim);
  float *acc = reinterpret_cast<float *>(scratch);
  for (int r = 0; r < rows; ++r) {
    float top = -FLT_MAX;
    for (int i = 0; i < count; ++i) {
      const float peak = partials[i * size + r];
      if (peak > top) top = peak;
    }
    float sum = 0;
    std::memset(acc, 0, sizeof(float) * layer.head_dim);
    for (int i = 0; i < count; ++i) {
      const State part = State::at(const_cast<float *>(partials) + i * size, rows);
      const vf weight = exp_of<6>(splat(part.max[r] - top));
      sum += first(weight) * part.sum[r];
      const float *from = part.acc + std::size_t(r) * layer.head_dim;
      for (int d = 0; d < layer.head_dim; d += kWidth)
        store(acc + d, fma(weight, load(from + d), load(acc + d)));
    }
    write_row<T>(layer, task, r, acc, top, sum);
  }
}

std::uint64_t read_slots(const Layer &layer, const std::int32_t *slots, int first, int last,
                         int bytes) {
  typedef std::uint64_t line __attribute__((vector_size(64)));
  line sum = {};
  const auto read = [&](const char *p) {
    int offset = 0;
    for (; offset + 64 <= bytes; offset += 64) {
      line x;
      std::memcpy(&x, p + offset, sizeof x);
      sum += x;
    }
    for (; offset < bytes; ++offset) sum[0] += static_cast<unsigned char>(p[offset]);
  };
  for (int k = first; k < last; ++k) {
    const std::int32_t ahead = slots[smaller(k + 16, last - 1)];
    prefetch(at_slot(layer.keys, ahead), bytes);
    prefetch(at_slot(layer.values, ahead), bytes);
    read(at_slot(layer.keys, slots[k]));
    read(at_slot(layer.values, slots[k]));
  }
  std::uint64_t total_sum = 0;
  for (int i = 0; i < 8; ++i) total_sum += sum[i];
  return total_sum;
}

template <class P>
std::size_t scratch_bytes(const Layer &layer, int decode_rows, int extend_rows) {
  Arena decode_arena(nullptr), extend_arena(nullptr);
  DecodeScratch<P>(decode_arena, layer, decode_rows);
  ExtendScratch<P>(extend_arena, layer, extend_rows);
  return decode_arena.used() > extend_arena.used() ? decode_arena.used() : extend_arena.used();
}

template <class P>
constexpr Kernels kernels = {decode<P>, extend<P>, merge<typename P::Element>, scratch_bytes<P>,
                             read_slots};

}  // namespace
