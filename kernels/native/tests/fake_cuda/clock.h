// Vector clock over the streams of the simulated device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fake {

// Number of jobs of each stream that are known to be complete. The host has one clock for all its
// threads: it learns of a completion on one thread and tells the others by means that this library
// does not see.
class Clock {
 public:
  std::uint64_t operator[](std::size_t stream) const {
    return stream < jobs_.size() ? jobs_[stream] : 0;
  }
  void set(std::size_t stream, std::uint64_t jobs) {
    if (stream >= jobs_.size()) jobs_.resize(stream + 1);
    jobs_[stream] = jobs;
  }
  void join(const Clock& other) {
    if (other.jobs_.size() > jobs_.size()) jobs_.resize(other.jobs_.size());
    for (std::size_t i = 0; i < other.jobs_.size(); ++i) {
      if (other.jobs_[i] > jobs_[i]) jobs_[i] = other.jobs_[i];
    }
  }

 private:
  std::vector<std::uint64_t> jobs_;
};

}  // namespace fake
