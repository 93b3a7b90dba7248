// Strided range of addresses: `height` rows of `width` bytes, `pitch` bytes apart.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fake {

struct Range {
  std::int64_t base = 0, width = 0, height = 1, pitch = 0;

  Range(const void* address, std::size_t bytes) : Range(address, bytes, 1, bytes) {}
  Range(const void* address, std::size_t row, std::size_t rows, std::size_t step)
      : base(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address))),
        width(static_cast<std::int64_t>(row)),
        height(static_cast<std::int64_t>(rows)),
        pitch(static_cast<std::int64_t>(step)) {
    if (pitch == width) width *= height, height = 1;
    if (pitch == 0) height = std::min<std::int64_t>(height, 1);
  }

  bool empty() const { return width <= 0 || height <= 0; }
  std::int64_t end() const { return base + (height - 1) * pitch + width; }
  // Returns whether the two ranges share a byte.
  bool overlaps(const Range& other) const {
    if (empty() || other.empty() || base >= other.end() || other.base >= end()) return false;
    if (height == 1) return other.meets(base, width);
    if (other.height == 1) return meets(other.base, other.width);
    if (pitch == other.pitch) {
      // Rows i and j overlap if (i - j) * pitch lies between these bounds, which it excludes.
      const std::int64_t distance = other.base - base;
      return multiple_between(distance - width, distance + other.width, pitch, 1 - other.height);
    }
    const Range& few = height < other.height ? *this : other;
    const Range& many = height < other.height ? other : *this;
    const std::int64_t before = many.base - few.width - few.base;
    const std::int64_t first = std::max<std::int64_t>(0, before / few.pitch);
    for (std::int64_t row = first; row < few.height; ++row) {
      const std::int64_t at = few.base + row * few.pitch;
      if (at >= many.end()) break;
      if (many.meets(at, few.width)) return true;
    }
    return false;
  }

 private:
  // Returns whether a multiple k * step, with first <= k, lies in the open interval. No last one is
  // needed, because the two ranges overlap if their gaps are filled.
  static bool multiple_between(std::int64_t low, std::int64_t high, std::int64_t step,
                               std::int64_t first) {
    const std::int64_t quotient = low / step - (low % step < 0);  // rounded down
    const std::int64_t k = std::max(first, quotient + 1);
    return k * step < high;
  }
  // Returns whether a row shares a byte with [at, at + bytes), which begins before the end.
  bool meets(std::int64_t at, std::int64_t bytes) const {
    if (height == 1) return base < at + bytes && at < base + width;
    return multiple_between(at - width - base, at + bytes - base, pitch, 0);
  }
};

}  // namespace fake
