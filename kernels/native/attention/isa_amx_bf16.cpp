// AMX kernels: matrix products of an extend task in tile registers, the rest with AVX-512 BF16. The
// packed operands are those of vdpbf16ps, which are also those of tdpbf16ps.
#include "avx512_bf16.inl"
#include "kernels.inl"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 16;  // operands of a line of a tile: 64 bytes

struct TileProduct : DotProduct {
  static constexpr int kRowBlock = 2 * kTileRows;
};

// Keeps the reads and writes of the compiler's code on their side of a tile instruction: GCC's
// intrinsics do not declare which memory they read.
inline void fence() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows,
                           kTileRows, kTileRows, kTileRows, kTileRows};
};
static_assert(sizeof(TileConfig) == 64, "");
constexpr TileConfig kConfig;

// Tiles 0 to 3 accumulate up to 2 by 2 tiles of c, 4 and 5 hold rows of a, 6 and 7 columns of b.
template <>
struct Multiplier<TileProduct> {
  using Operand = TileProduct::Operand;

  // Other code of this thread may rely on its own configuration of the tiles (oneDNN).
  Multiplier() {
    _tile_storeconfig(before_);
    fence();
    _tile_loadconfig(&kConfig);
  }
  ~Multiplier() {
    fence();
    _tile_loadconfig(before_);
  }
  Multiplier(const Multiplier &) = delete;

  template <bool Rescaled>
  void multiply(int rows, int vectors, const Operand *a, int a_stride, const Operand *b,
                int b_stride, int depth, const float *rescale, float *c, int c_stride) const {
    if (depth % kTileDepth) {
      product<TileProduct, Rescaled, kGemmVectors>(rows, vectors, a, a_stride, b, b_stride, depth,
                                                   rescale, c, c_stride);
      return;
    }
    const auto run = rows > kTileRows ? columns<Rescaled, 2> : columns<Rescaled, 1>;
    run(rows, vectors, a, a_stride, b, b_stride, depth, rescale, c, c_stride);
  }

 private:
  template <bool Rescaled, int Rows>
  static void columns(int rows, int vectors, const Operand *a, int a_stride, const Operand *b,
                      int b_stride, int depth, const float *rescale, float *c, int c_stride) {
    int v = 0;
    for (; v + 2 <= vectors; v += 2)
      block<Rescaled, Rows, 2>(rows, a, a_stride, b + v * kWidth, b_stride, depth, rescale,
                               c + v * kWidth, c_stride);
    if (v < vectors)
      block<Rescaled, Rows, 1>(rows, a, a_stride, b + v * kWidth, b_stride, depth, rescale,
                               c + v * kWidth, c_stride);
  }

  template <bool Rescaled, int Rows, int Columns>
  static void block(int rows, const Operand *a, int a_stride, const Operand *b, int b_stride,
                    int depth, const float *rescale, float *c, int c_stride) {
    const std::size_t a_bytes = a_stride * sizeof(Operand), b_bytes = b_stride * sizeof(Operand);
    fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < depth; d += kTileDepth) {
      _tile_loadd(4, a + d, a_bytes);
      _tile_loadd(6, b + d * b_stride, b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (Columns > 1) {
        _tile_loadd(7, b + d * b_stride + kWidth, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (Rows > 1) {
        _tile_loadd(5, a + kTileRows * a_stride + d, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (Columns > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    alignas(64) float sums[Rows * kTileRows][Columns * kWidth];
    float *to = Rescaled ? sums[0] : c;
    const int stride = Rescaled ? Columns * kWidth : c_stride;
    const std::size_t bytes = stride * sizeof(float);
    _tile_stored(0, to, bytes);
    if constexpr (Columns > 1) _tile_stored(1, to + kWidth, bytes);
    if constexpr (Rows > 1) {
      _tile_stored(2, to + kTileRows * stride, bytes);
      if constexpr (Columns > 1) _tile_stored(3, to + kTileRows * stride + kWidth, bytes);
    }
    if constexpr (!Rescaled) return;
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < Columns; ++v) {
        float *out = c + r * c_stride + v * kWidth;
        store(out, fma(splat(rescale[r]), load(out), load(sums[r] + v * kWidth)));
      }
    }
  }

  alignas(64) unsigned char before_[sizeof(TileConfig)];
};

}  // namespace

namespace sgl_ext::attention {
const Kernels amx_bf16 = kernels<TileProduct>;
}  // namespace sgl_ext::attention
