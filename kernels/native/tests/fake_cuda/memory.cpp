#include "memory.h"

#include <cstdio>
#include <iterator>

namespace fake {

std::size_t Areas::bytes_at(const void* memory) const {
  const auto area = ends_.find(Range(memory, 1).base);
  return area == ends_.end() ? 0 : static_cast<std::size_t>(area->second - area->first);
}

std::pair<std::int64_t, std::int64_t> Areas::around(std::int64_t byte) const {
  const auto after = ends_.upper_bound(byte);
  if (after == ends_.begin() || std::prev(after)->second <= byte) return {0, 0};
  return *std::prev(after);
}

bool Areas::meets(const Range& range) const {
  const auto after = ends_.lower_bound(range.end());
  return after != ends_.begin() && std::prev(after)->second > range.base;
}

bool Areas::contain(const Range& range) const {
  std::int64_t from = range.base;
  auto area = ends_.upper_bound(from);
  if (area == ends_.begin()) return false;
  for (--area; area != ends_.end() && area->first <= from; ++area) {
    if (area->second >= range.end()) return true;
    from = std::max(from, area->second);
  }
  return false;
}

std::size_t Areas::bytes() const {
  std::int64_t sum = 0;
  for (const auto& [begin, end] : ends_) sum += end - begin;
  return static_cast<std::size_t>(sum);
}

bool Memory::unmapped(const Range& range) const {
  if (!reserved.meets(range) || usable.contain(range)) return false;
  Range row = range;
  row.height = 1;
  for (std::int64_t i = 0; i < range.height; ++i, row.base += range.pitch) {
    if (!usable.contain(row)) return true;
  }
  return false;
}

void Memory::map(const Range& range, std::uint64_t file) {
  const auto [piece, is_new] = pieces_.insert({file, next_piece_});
  if (is_new) next_piece_ += range.end() - range.base;
  mapped.add(range);
  piece_at_[range.base] = piece->second;
}

void Memory::unmap(const void* memory) {
  mapped.remove(memory);
  usable.remove(memory);
  piece_at_.erase(Range(memory, 1).base);
}

std::vector<Range> Memory::physical(Range range) const {
  std::vector<Range> parts;
  while (!range.empty()) {
    const auto [begin, end] = mapped.around(range.base);
    if (begin == end) {
      parts.push_back(range);
      break;
    }
    Range part = range;
    if (range.end() <= end) {
      range.height = 0;
    } else if (range.base + range.width <= end) {  // whole rows
      part.height = std::min(range.height, (end - range.base - range.width) / range.pitch + 1);
      range.base += part.height * range.pitch;
      range.height -= part.height;
    } else {  // a row that continues in the next piece
      part.width = end - range.base;
      part.height = 1;
      Range rest = range;
      rest.base = end;
      rest.width -= part.width;
      rest.height = 1;
      for (const Range& more : physical(rest)) parts.push_back(more);
      range.base += range.pitch;
      --range.height;
    }
    part.base += piece_at_.at(begin) - begin;
    parts.push_back(part);
  }
  return parts;
}

std::string Memory::describe(const Range& range) const {
  char text[160];
  const auto width = static_cast<long long>(range.width);
  const auto base = static_cast<unsigned long long>(range.base);
  if (range.height == 1) {
    std::snprintf(text, sizeof text, "%lld bytes at %#llx", width, base);
  } else {
    std::snprintf(text, sizeof text, "%lld rows of %lld bytes, one every %lld bytes, at %#llx",
                  static_cast<long long>(range.height), width, static_cast<long long>(range.pitch),
                  base);
  }
  for (const auto& [bytes, name] : names_) {
    const auto& [named, of] = name;
    if (!named.overlaps(range)) continue;
    return std::string(text) + " [" + of + " + " + std::to_string(range.base - named.base) + "]";
  }
  return text;
}

}  // namespace fake
