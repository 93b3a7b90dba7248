// Overlap check for the copies of a batch, which run in any order.
#pragma once

#include <optional>
#include <vector>

#include "types.h"

namespace sgl_ext::transfer {

struct Overlap {
  std::size_t writer;  // index of the copy whose destination overlaps
  std::size_t other;   // index of the copy whose source or destination it overlaps
  bool other_is_source;
};

// Finds a destination that shares bytes with another destination or with a source, if there is one.
// The check is exact: strided copies that interleave without a common byte (layer 0 and layer 1 of
// the same blocks) do not overlap. Takes O(n log n) time if overlapping extents have one pitch,
// otherwise O(log n) for each row that is interleaved with rows of another copy; O(n) memory.
// Addresses, sizes and pitches must be valid.
std::optional<Overlap> find_overlap(const std::vector<Copy>& copies);

}  // namespace sgl_ext::transfer
