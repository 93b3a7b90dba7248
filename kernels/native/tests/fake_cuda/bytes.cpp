#include "bytes.h"

#include <array>
#include <cstring>

namespace fake {

namespace {

constexpr int kPoison = 0xA5;

std::uint32_t crc32(std::uint32_t crc, const unsigned char* bytes, std::size_t count) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> values{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
      values[i] = value;
    }
    return values;
  }();
  crc = ~crc;
  for (std::size_t i = 0; i < count; ++i) crc = crc >> 8 ^ table[(crc ^ bytes[i]) & 255];
  return ~crc;
}

// Calls `use(row)` for each row of the accesses of a kernel that have this value of `write`.
template <class Use>
void each_row(const Job& job, int write, Use use) {
  for (const fake_access& access : job.accesses) {
    if (access.write != write) continue;
    for (std::size_t row = 0; row < access.height; ++row) {
      use(static_cast<char*>(access.base) + row * access.pitch, access.width);
    }
  }
}

void fill(char* row, std::size_t width, std::uint64_t pattern) {
  for (std::size_t at = 0; at < width; at += sizeof pattern) {
    std::memcpy(row + at, &pattern, std::min(width - at, sizeof pattern));
  }
}

}  // namespace

bool overwrites_what_it_reads(const Job& job) {
  bool found = false;
  each_access(job, [&](const Range& written, bool writes) {
    if (!writes) return;
    each_access(job, [&](const Range& read, bool also_writes) {
      found |= !also_writes && written.overlaps(read);
    });
  });
  return found;
}

std::uint32_t checksum(const Job& job) {
  std::uint32_t crc = 0;
  each_row(job, 0, [&](const char* row, std::size_t width) {
    crc = crc32(crc, reinterpret_cast<const unsigned char*>(row), width);
  });
  return crc;
}

void poison(const Job& job) {
  each_row(job, 1, [](char* row, std::size_t width) { std::memset(row, kPoison, width); });
  for (const Copy& copy : job.copies) {
    if (source(copy).overlaps(destination(copy))) continue;
    for (std::size_t row = 0; row < copy.height; ++row) {
      std::memset(copy.dst + row * copy.dst_pitch, kPoison, copy.width);
    }
  }
}

void write(const Job& job) {
  for (const Copy& copy : job.copies) {
    for (std::size_t row = 0; row < copy.height; ++row) {
      std::memcpy(copy.dst + row * copy.dst_pitch, copy.src + row * copy.src_pitch, copy.width);
    }
  }
  each_row(job, 1, [&](char* row, std::size_t width) { fill(row, width, job.fill); });
}

}  // namespace fake
