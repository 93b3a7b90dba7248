// Tests that find_overlap accepts batches that can run in any order, and only those.
#include <random>

#include "check.h"
#include "overlap.h"

namespace sgl_ext::transfer {
namespace {

TEST(rows_are_not_spread_out_to_find_an_overlap) {
  // Two pitches in one range of addresses; one copy has more rows than memory could list.
  constexpr std::int64_t kRows = std::int64_t{1} << 38;
  const Copy many{0, kFileSpace, 64, kRows, 1024, 64};
  const auto beside = [&](std::int64_t column) {
    return Copy{kFileSpace / 2, 1024 * (kRows / 3) + column, 8, 1000, 8, 3 * 1024};
  };
  CHECK(!find_overlap({many, beside(64)}));
  CHECK(!find_overlap({many, beside(1016)}));
  for (const std::int64_t column : {-7, 0, 63, 1017}) {
    const auto overlap = find_overlap({many, beside(column)});
    CHECK(overlap && overlap->writer == 1 && overlap->other == 0 && overlap->other_is_source);
  }
}

TEST(one_wide_read_does_not_slow_down_the_others) {
  // Narrow copies that all cross one row, and a read that spans it. Comparing each copy with all
  // others would take minutes.
  constexpr std::int64_t kCopies = 300'000, kPitch = kCopies * 16 + 64;
  std::vector<Copy> copies = {{kPitch - 32, kFileSpace / 2, 4, 5, kPitch, kPitch},
                              {0, kFileSpace / 2 + 6 * kPitch, kPitch - 16, 1, 0, 0}};
  for (std::int64_t i = 0; i < kCopies; ++i) {
    const std::int64_t at = kPitch + i * 16;
    copies.push_back({at, at + 8, 4, 3, kPitch, kPitch});
  }
  CHECK(!find_overlap(copies));
  copies.push_back({kFileSpace / 4, kPitch + 8 * kCopies + 3, 1, 1, 1, 1});
  const auto overlap = find_overlap(copies);
  CHECK(overlap && overlap->other_is_source && overlap->writer == copies.size() - 1);
  CHECK(overlap->other == kCopies / 2 + 2);
}

// Returns whether copies overlap, byte by byte: a byte is written twice, or both read and written.
bool disturb_each_other(const std::vector<Copy>& copies, std::size_t size) {
  std::vector<int> written(size, 0);
  const auto each_byte = [](std::int64_t first, std::int64_t pitch, const Copy& copy, auto use) {
    for (std::int64_t row = 0; row < copy.height; ++row) {
      for (std::int64_t i = 0; i < copy.width; ++i) {
        use(static_cast<std::size_t>(first + row * pitch + i));
      }
    }
  };
  bool met = false;
  for (const Copy& c : copies) {
    each_byte(c.dst, c.dst_pitch, c, [&](std::size_t at) { met |= written[at]++ > 0; });
  }
  for (const Copy& c : copies) {
    each_byte(c.src, c.src_pitch, c, [&](std::size_t at) { met |= written[at] > 0; });
  }
  return met;
}

TEST(many_rectangles_are_judged_as_their_bytes_are) {
  std::mt19937 random(1);
  const auto draw = [&](std::int64_t below) {
    return static_cast<std::int64_t>(random() % static_cast<unsigned>(below));
  };
  int apart = 0;
  constexpr int kRounds = 3000;
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t pitch = 40 + draw(40);
    std::vector<Copy> copies(static_cast<std::size_t>(2 + draw(24)));
    for (Copy& c : copies) {
      // Each copy is at most 3 bytes wide or has one row, so that not every batch overlaps.
      const bool tall = draw(2) == 0;
      c = {draw(20 * pitch), 0, 1 + draw(tall ? 3 : pitch), tall ? 1 + draw(12) : 1, pitch, pitch};
      c.dst = 40 * pitch + draw(20 * pitch);
      if (draw(3) == 0) std::swap(c.src, c.dst);
      if (draw(4) == 0) c.dst += 100 * pitch;
    }
    const bool met = disturb_each_other(copies, static_cast<std::size_t>(200 * pitch));
    const auto overlap = find_overlap(copies);
    CHECK(overlap.has_value() == met);
    apart += !met;
    if (!overlap) continue;
    // The two copies that are reported overlap without the others, too.
    std::vector<Copy> two = {copies[overlap->writer]};
    if (overlap->other != overlap->writer) two.push_back(copies[overlap->other]);
    CHECK(disturb_each_other(two, static_cast<std::size_t>(200 * pitch)));
  }
  CHECK(apart > kRounds / 20 && apart < kRounds * 19 / 20);
}

}  // namespace
}  // namespace sgl_ext::transfer

int main(int count, char** arguments) { return check::run(count, arguments); }
