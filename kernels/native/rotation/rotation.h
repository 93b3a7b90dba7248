// Copies of KV whose keys are rotated on the way, to where they stand in another prompt.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext::rotation {

// What lies contiguous for each token: for each layer its keys, then its values, `heads` rows of
// `head_dim` elements each.
struct Shape {
  int layers;
  int heads;
  int head_dim;
  int rotary_dim;    // leading elements of a key that are rotated; even
  bool interleaved;  // pairs are (0, 1), (2, 3)...; otherwise (0, rotary_dim / 2)...

  std::size_t elements() const { return std::size_t(layers) * 2 * heads * head_dim; }
};

// A run of tokens that follow each other on both sides, `pitch` bytes apart.
struct Run {
  const char *from;
  char *to;
  std::int64_t tokens;
  std::int64_t from_pitch;
  std::int64_t to_pitch;
};

enum class Element { bf16, fp32 };

// Copies tokens `first .. last - 1` of all runs, counted through. `cosines` and `sines` are of the
// rotary_dim / 2 angles; the products are in fp32, rounded once to nearest even.
void copy(const Run *runs, std::size_t count, std::int64_t first, std::int64_t last,
          const Shape &shape, Element element, const float *cosines, const float *sines);

}  // namespace sgl_ext::rotation
