#include "overlap.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <queue>

namespace sgl_ext::transfer {

namespace {

// Bytes that one side of a copy accesses.
struct Footprint {
  std::int64_t first, width, rows, pitch;
  std::size_t op;
  bool written;

  std::int64_t end() const { return first + (rows - 1) * pitch + width; }
};

// Columns [left, right) of rows [top, bottom) of the address space, divided into rows of one pitch.
struct Rectangle {
  std::int64_t top, bottom, left, right;
  std::size_t op;
  bool written;
};

template <class Side>
Overlap pair(const Side& a, const Side& b) {
  return a.written ? Overlap{a.op, b.op, !b.written} : Overlap{b.op, a.op, true};
}

// Sweeps over the rows of all footprints in address order, with any mix of pitches. Keeps only the
// next row of each footprint, and skips rows between which no row of another footprint begins.
std::optional<Overlap> sweep(const std::vector<const Footprint*>& footprints) {
  using Next = std::pair<std::int64_t, const Footprint*>;  // start of its next row
  std::priority_queue<Next, std::vector<Next>, std::greater<>> nexts;
  for (const Footprint* f : footprints) nexts.emplace(f->first, f);
  struct Furthest {
    std::int64_t end = std::numeric_limits<std::int64_t>::min();
    const Footprint* of = nullptr;
  } read, written;
  for (;;) {
    const auto [begin, f] = nexts.top();
    nexts.pop();
    if (written.end > begin) return pair(*written.of, *f);
    if (f->written && read.end > begin) return pair(*f, *read.of);
    if (nexts.empty()) return std::nullopt;  // rows of one footprint do not overlap
    Furthest& furthest = f->written ? written : read;
    if (furthest.end < begin + f->width) furthest = {begin + f->width, f};
    if (begin + f->width == f->end()) continue;
    // A row that ends before the next row of any other footprint begins overlaps no later row.
    const std::int64_t other = nexts.top().first;
    std::int64_t row = (begin - f->first) / f->pitch + 1;
    row = std::max(row, (other - f->width - f->first) / f->pitch);
    if (row < f->rows) nexts.emplace(f->first + row * f->pitch, f);
  }
}

// Written rectangles that cross the sweep line. They are disjoint: among the rectangles that begin
// left of a column, the last one extends furthest right.
class Writes {
 public:
  void add(const Rectangle& rectangle) { by_left_.emplace(rectangle.left, &rectangle); }
  void remove(const Rectangle& rectangle) { by_left_.erase(rectangle.left); }

  const Rectangle* meeting(const Rectangle& other) const {
    const auto after = by_left_.lower_bound(other.right);
    if (after == by_left_.begin()) return nullptr;
    const Rectangle* last = std::prev(after)->second;
    return last->right > other.left ? last : nullptr;
  }

 private:
  std::map<std::int64_t, const Rectangle*> by_left_;
};

// Read rectangles that cross the sweep line, which may share columns. A tournament tree
// in the order of their left columns; each inner node holds the rectangle of its subtree
// that extends furthest right.
class Reads {
 public:
  explicit Reads(const std::vector<Rectangle>& rectangles) {
    for (const Rectangle& r : rectangles) {
      if (!r.written) order_.emplace_back(r.left, &r);
    }
    std::sort(order_.begin(), order_.end());
    furthest_.resize(2 * order_.size());
  }
  void add(const Rectangle& rectangle) { set(rectangle, &rectangle); }
  void remove(const Rectangle& rectangle) { set(rectangle, nullptr); }

  const Rectangle* meeting(const Rectangle& other) const {
    const Rectangle* last = nullptr;
    std::size_t from = order_.size(), to = from + begun_before(other.right);
    for (; from < to; from /= 2, to /= 2) {
      if (from % 2) last = further(last, furthest_[from++]);
      if (to % 2) last = further(last, furthest_[--to]);
    }
    return last && last->right > other.left ? last : nullptr;
  }

 private:
  using Place = std::pair<std::int64_t, const Rectangle*>;

  static const Rectangle* further(const Rectangle* a, const Rectangle* b) {
    return !b || (a && a->right >= b->right) ? a : b;
  }
  std::size_t begun_before(std::int64_t column) const {
    const auto place = std::lower_bound(order_.begin(), order_.end(), Place{column, nullptr});
    return static_cast<std::size_t>(place - order_.begin());
  }
  void set(const Rectangle& rectangle, const Rectangle* present) {
    const auto place =
        std::lower_bound(order_.begin(), order_.end(), Place{rectangle.left, &rectangle});
    auto node = order_.size() + static_cast<std::size_t>(place - order_.begin());
    furthest_[node] = present;
    for (node /= 2; node > 0; node /= 2) {
      furthest_[node] = further(furthest_[2 * node], furthest_[2 * node + 1]);
    }
  }

  std::vector<Place> order_;
  std::vector<const Rectangle*> furthest_;  // the second half holds the leaves
};

std::optional<Overlap> sweep(std::vector<Rectangle>& rectangles) {
  std::sort(rectangles.begin(), rectangles.end(),
            [](const Rectangle& a, const Rectangle& b) { return a.top < b.top; });
  std::vector<std::size_t> by_bottom(rectangles.size());
  for (std::size_t i = 0; i < by_bottom.size(); ++i) by_bottom[i] = i;
  std::sort(by_bottom.begin(), by_bottom.end(), [&](std::size_t a, std::size_t b) {
    return rectangles[a].bottom < rectangles[b].bottom;
  });
  Reads reads(rectangles);
  Writes writes;
  auto leaving = by_bottom.begin();
  for (const Rectangle& next : rectangles) {
    for (; rectangles[*leaving].bottom <= next.top; ++leaving) {
      const Rectangle& last = rectangles[*leaving];
      last.written ? writes.remove(last) : reads.remove(last);
    }
    if (const Rectangle* met = writes.meeting(next)) return pair(*met, next);
    if (next.written) {
      if (const Rectangle* met = reads.meeting(next)) return pair(next, *met);
    }
    next.written ? writes.add(next) : reads.add(next);
  }
  return std::nullopt;
}

void cut(const Footprint& f, std::int64_t origin, std::int64_t pitch,
         std::vector<Rectangle>& into) {
  const std::int64_t top = (f.first - origin) / pitch, left = (f.first - origin) % pitch;
  const auto add = [&](std::int64_t from, std::int64_t to, std::int64_t l, std::int64_t r) {
    if (from < to && l < r) into.push_back({from, to, l, r, f.op, f.written});
  };
  if (f.rows > 1) {
    add(top, top + f.rows, left, std::min(left + f.width, pitch));
    add(top + 1, top + 1 + f.rows, 0, left + f.width - pitch);
    return;
  }
  const std::int64_t last = (f.end() - 1 - origin) / pitch;
  const std::int64_t right = (f.end() - 1 - origin) % pitch + 1;
  if (last == top) {
    add(top, top + 1, left, right);
  } else {
    add(top, top + 1, left, pitch);
    add(top + 1, last, 0, pitch);
    add(last, last + 1, 0, right);
  }
}

// Checks footprints whose extents form one contiguous range of addresses.
std::optional<Overlap> check_stretch(const std::vector<const Footprint*>& stretch) {
  std::int64_t pitch = 0;
  bool one_pitch = true;
  for (const Footprint* f : stretch) {
    if (f->rows == 1) continue;
    one_pitch &= pitch == 0 || pitch == f->pitch;
    pitch = f->pitch;
  }
  if (pitch != 0 && one_pitch) {
    std::vector<Rectangle> rectangles;
    for (const Footprint* f : stretch) cut(*f, stretch.front()->first, pitch, rectangles);
    return sweep(rectangles);
  }
  return sweep(stretch);
}

Footprint footprint(std::int64_t first, std::int64_t pitch, const Copy& copy, std::size_t op,
                    bool written) {
  if (copy.height == 1 || copy.width == pitch) return {first, copy.bytes(), 1, 0, op, written};
  return {first, copy.width, copy.height, pitch, op, written};
}

}  // namespace

std::optional<Overlap> find_overlap(const std::vector<Copy>& copies) {
  std::vector<Footprint> footprints;
  footprints.reserve(2 * copies.size());
  for (std::size_t op = 0; op < copies.size(); ++op) {
    const Copy& copy = copies[op];
    footprints.push_back(footprint(copy.src, copy.src_pitch, copy, op, false));
    footprints.push_back(footprint(copy.dst, copy.dst_pitch, copy, op, true));
  }
  std::vector<std::pair<std::int64_t, std::uint32_t>> order;
  order.reserve(footprints.size());
  for (std::size_t i = 0; i < footprints.size(); ++i) {
    order.emplace_back(footprints[i].first, static_cast<std::uint32_t>(i));
  }
  std::sort(order.begin(), order.end());

  std::vector<const Footprint*> stretch;
  for (std::size_t i = 0; i < order.size();) {
    std::int64_t end = footprints[order[i].second].end();
    bool written = false;
    std::size_t next = i;
    for (; next < order.size() && (next == i || order[next].first < end); ++next) {
      const Footprint& f = footprints[order[next].second];
      end = std::max(end, f.end());
      written |= f.written;
    }
    if (written && next - i > 1) {
      stretch.clear();
      for (; i < next; ++i) stretch.push_back(&footprints[order[i].second]);
      if (auto overlap = check_stretch(stretch)) return overlap;
    }
    i = next;
  }
  return std::nullopt;
}

}  // namespace sgl_ext::transfer
