// Finds accesses to the same bytes of which no synchronization orders one before the other.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "job.h"
#include "memory.h"
#include "range.h"

namespace fake {

// A job is ordered after what the host knew to be complete when it was enqueued, which the checker
// forgets, after what its stream did and waited for before, and after nothing else. The order of
// calls decides, not when jobs run. The device's mutex protects it.
class Checker {
 public:
  explicit Checker(const Memory& memory) : memory_(memory) {}

  // Returns the component of a new stream. Those of ended streams are used again.
  std::size_t add_stream();
  void end_stream(std::size_t stream) { ended_.push_back(stream); }

  void enqueue(Job& job);
  // `in_order` is false for a read that may precede the work that its stream already has.
  void access(const std::shared_ptr<Job>& job, const Range& range, bool write,
              bool in_order = true);
  const Clock& clock(std::size_t stream) const { return streams_[stream].clock; }
  void wait(std::size_t stream, const Clock& clock) { streams_[stream].clock.join(clock); }

  // The host has waited for jobs.
  void host_waits(const Clock& clock);
  Clock everything() const;
  void host_access(const Range& range, bool write);
  // The host frees, unmaps or unregisters addresses, as `does` says. Returns the jobs that access
  // them, and forgets these jobs.
  std::vector<std::shared_ptr<Job>> invalidate(const Range& range, const char* does);

  void report(std::string text);
  const std::deque<std::string>& reports() const { return reports_; }
  std::size_t count() const { return count_; }
  void clear();

 private:
  struct Access {
    Range range;               // as the job addresses it
    std::vector<Range> parts;  // where it is in memory
    bool write;
    std::shared_ptr<Job> job;
  };
  struct Stream {
    Clock clock;
    std::uint64_t jobs = 0;
    std::deque<Access> pending;  // that the host does not know to be complete, in stream order
  };

  template <class Use>
  void each_unordered(const Clock& clock, Use use) const;
  std::string describe(const Access& access) const;

  const Memory& memory_;
  Clock host_;
  std::deque<Stream> streams_;
  std::vector<std::size_t> ended_;
  std::deque<std::string> reports_;
  std::size_t count_ = 0;
};

}  // namespace fake
