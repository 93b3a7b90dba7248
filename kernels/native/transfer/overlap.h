// Whether the copies of a batch, which run in any order, can disturb each other.
#pragma once

#include <optional>
#include <vector>

#include "types.h"

namespace sgl_ext::transfer {

struct Overlap {
  std::size_t writer;  // the copy whose destination ...
  std::size_t other;   // ... shares bytes with this one's
  bool other_is_source;
};

// Exact: strided copies that interleave without a common byte (layer 0 and layer 1 of the same
// blocks) do not overlap. O(n log n) where overlapping extents have one pitch; otherwise O(log n)
// for each row that lies beside another copy's. Memory is O(n). Addresses, sizes and pitches must
// be valid.
std::optional<Overlap> find_overlap(const std::vector<Copy>& copies);

}  // namespace sgl_ext::transfer
