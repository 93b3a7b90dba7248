// Jobs of a stream: copies, simulated kernels, and records of and waits for events.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "fake_cuda.h"

namespace fake {

enum class Kind { copy, kernel, record, wait };

struct Copy {
  char* dst;
  const char* src;
  std::size_t dst_pitch, src_pitch, width, height;
};

// One recording of an event. A wait refers to the record that was current when it was called.
struct Record {
  bool done = false;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Job {
  Kind kind;
  std::vector<Copy> copies = {};
  std::vector<fake_access> accesses = {};
  std::uint64_t fill = 0;
  std::shared_ptr<Record> record = nullptr;

  std::int64_t id = 0;
  std::size_t stream = 0;  // its component of the clocks
  std::uint64_t tick = 0;  // its position in the stream, from 1
  std::string name = {};
  // Schedule: the job waits, poisons what it will write, and waits again (in microseconds).
  bool scheduled = false, reads_late = false;
  unsigned start = 0, length = 0;
  bool touching = false;  // it accesses memory at the moment
  bool dead = false;      // its memory was freed: it may not access it any more
};

// Returns what this thread calls the jobs that it enqueues.
const std::string& tag();

}  // namespace fake
