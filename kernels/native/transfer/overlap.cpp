#include "overlap.h"

#include <algorithm>
#include <map>

namespace sgl_ext::transfer {

namespace {

// The bytes that one side of one copy touches.
struct Footprint {
  std::int64_t first, width, rows, pitch;
  std::size_t op;
  bool written;

  std::int64_t end() const { return first + (rows - 1) * pitch + width; }
};

// Bytes [begin, end) of a line.
struct Interval {
  std::int64_t begin, end;
  std::size_t op;
  bool written;
};

// Columns [left, right) of rows [top, bottom), with the address cut into rows of one pitch.
struct Rectangle {
  std::int64_t top, bottom, left, right;
  std::size_t op;
  bool written;
};

template <class Side>
Overlap pair(const Side& a, const Side& b) {
  return a.written ? Overlap{a.op, b.op, !b.written} : Overlap{b.op, a.op, true};
}

std::optional<Overlap> sweep(std::vector<Interval>& intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  const Interval* furthest_read = nullptr;
  const Interval* furthest_write = nullptr;
  for (const Interval& next : intervals) {
    if (furthest_write && furthest_write->end > next.begin) return pair(*furthest_write, next);
    if (next.written && furthest_read && furthest_read->end > next.begin) {
      return pair(next, *furthest_read);
    }
    const Interval*& furthest = next.written ? furthest_write : furthest_read;
    if (!furthest || furthest->end < next.end) furthest = &next;
  }
  return std::nullopt;
}

// Rectangles that cross the sweep line, by their left column.
class Crossing {
 public:
  using Place = std::multimap<std::int64_t, const Rectangle*>::iterator;

  Place add(const Rectangle& rectangle) {
    widest_ = std::max(widest_, rectangle.right - rectangle.left);
    return by_left_.emplace(rectangle.left, &rectangle);
  }
  void remove(Place place) { by_left_.erase(place); }

  const Rectangle* meeting(const Rectangle& other) const {
    for (auto it = by_left_.upper_bound(other.left - widest_);
         it != by_left_.end() && it->first < other.right; ++it) {
      if (it->second->right > other.left) return it->second;
    }
    return nullptr;
  }

 private:
  std::multimap<std::int64_t, const Rectangle*> by_left_;
  std::int64_t widest_ = 0;
};

std::optional<Overlap> sweep(std::vector<Rectangle>& rectangles) {
  std::sort(rectangles.begin(), rectangles.end(),
            [](const Rectangle& a, const Rectangle& b) { return a.top < b.top; });
  std::vector<std::size_t> by_bottom(rectangles.size());
  for (std::size_t i = 0; i < by_bottom.size(); ++i) by_bottom[i] = i;
  std::sort(by_bottom.begin(), by_bottom.end(), [&](std::size_t a, std::size_t b) {
    return rectangles[a].bottom < rectangles[b].bottom;
  });
  Crossing reads, writes;
  std::vector<Crossing::Place> places(rectangles.size());
  auto leaving = by_bottom.begin();
  for (std::size_t i = 0; i < rectangles.size(); ++i) {
    const Rectangle& next = rectangles[i];
    for (; rectangles[*leaving].bottom <= next.top; ++leaving) {
      (rectangles[*leaving].written ? writes : reads).remove(places[*leaving]);
    }
    if (const Rectangle* met = writes.meeting(next)) return pair(*met, next);
    if (next.written) {
      if (const Rectangle* met = reads.meeting(next)) return pair(next, *met);
    }
    places[i] = (next.written ? writes : reads).add(next);
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

// Footprints whose extents form one unbroken stretch of addresses.
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
  std::vector<Interval> intervals;
  for (const Footprint* f : stretch) {
    for (std::int64_t row = 0; row < f->rows; ++row) {
      const std::int64_t begin = f->first + row * f->pitch;
      intervals.push_back({begin, begin + f->width, f->op, f->written});
    }
  }
  return sweep(intervals);
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
