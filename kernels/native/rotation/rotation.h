// Copy of KV that rotates the keys to their positions in another prompt.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgl_ext::rotation {

// Contiguous layout of the KV of a token: for each layer its keys, then its values, each with
// `heads` rows of `head_dim` elements.
struct Shape {
  int layers;
  int heads;
  int head_dim;
  int rotary_dim;    // leading elements of a key that are rotated; even
  bool interleaved;  // pairs are (0, 1), (2, 3)...; otherwise (0, rotary_dim / 2)...

  std::size_t elements() const { return std::size_t(layers) * 2 * heads * head_dim; }
};

// Run of tokens at a constant pitch, in bytes, both in the source and in the destination.
struct Run {
  const char *from;
  char *to;
  std::int64_t tokens;
  std::int64_t from_pitch;
  std::int64_t to_pitch;
};

enum class Element { bf16, fp32 };

// Copies the tokens [first, last), numbered consecutively over all runs. `cosines` and `sines` are
// those of the rotary_dim / 2 angles, which are the same for all tokens. The rotation is computed
// in fp32; results in bf16 are rounded once, to nearest even.
void copy(const Run *runs, std::size_t count, std::int64_t first, std::int64_t last,
          const Shape &shape, Element element, const float *cosines, const float *sines);

}  // namespace sgl_ext::rotation
