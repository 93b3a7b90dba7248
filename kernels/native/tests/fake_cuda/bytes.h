// What jobs read and write.
#pragma once

#include <cstdint>

#include "job.h"
#include "range.h"

namespace fake {

inline Range source(const Copy& copy) {
  return Range(copy.src, copy.width, copy.height, copy.src_pitch);
}
inline Range destination(const Copy& copy) {
  return Range(copy.dst, copy.width, copy.height, copy.dst_pitch);
}

// Calls `use(range, write)` for each access of a job.
template <class Use>
void each_access(const Job& job, Use use) {
  for (const Copy& copy : job.copies) {
    use(source(copy), false);
    use(destination(copy), true);
  }
  for (const fake_access& access : job.accesses) {
    use(Range(access.base, access.width, access.height, access.pitch), access.write != 0);
  }
}

bool overwrites_what_it_reads(const Job& job);
// Returns the CRC-32 of the bytes that a kernel reads.
std::uint32_t checksum(const Job& job);
// Fills what the job will write with bytes that nobody should see.
void poison(const Job& job);
void write(const Job& job);

}  // namespace fake
