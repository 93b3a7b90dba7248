// The simulated device: streams, each with a thread that executes its jobs in order.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "checker.h"
#include "job.h"
#include "memory.h"

namespace fake {

struct Stream {
  int priority = 0;
  std::size_t index = 0;  // its component of the clocks
  std::uint64_t last = 0, completed = 0;  // positions of jobs in the stream
  bool ending = false;
  std::deque<std::shared_ptr<Job>> queue;
  std::condition_variable came;
  std::mt19937_64 random;
};

struct Event {
  bool timing = false;
  std::shared_ptr<Record> record;  // null: never recorded
};

// Failures to come.
struct Failures {
  int copies = 0, copy = 0, event = 0, record = 0, registration = 0, driver = 0;
};

class Device {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // There is one device, which is never destroyed because its threads outlive main().
  static Device& get();

  Stream* create_stream(int priority);
  int destroy_stream(Stream* stream);
  // Returns the stream of a handle, which may be the legacy stream, or null. Mutex held.
  std::shared_ptr<Stream> find(const void* handle);
  // Appends a job to a stream. Mutex held.
  void push(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Job>& job);

  void wait(Lock& lock, const std::shared_ptr<Stream>& stream);  // for its present jobs
  void wait_all(Lock& lock);
  // Checks that the host may free or unmap memory, and prevents unfinished jobs from accessing it.
  void invalidate(Lock& lock, const Range& range, const char* does);
  void seed(std::uint64_t seed);
  void reset();

  std::mutex mutex;  // of everything here
  std::condition_variable changed;
  Memory memory;
  Checker checker{memory};
  Failures failures;
  std::map<const void*, std::shared_ptr<Event>> events;
  std::map<std::int64_t, std::uint32_t> results;  // of kernels
  std::vector<void*> executed;
  int held = 0, outstanding = 0, most_outstanding = 0, pageable_copies = 0, batched_copies = 0;
  int streams() const { return static_cast<int>(handles_.size()); }

 private:
  std::shared_ptr<Stream> start_stream(int priority);
  void run(const std::shared_ptr<Stream>& stream);
  void execute(Lock& lock, Job& job);
  bool blocked(const Stream& stream) const;
  void schedule(Stream& stream, Job& job);
  void reseed(Stream& stream) const;
  template <class Use>
  void touch(Lock& lock, Job& job, Use use);

  std::map<const void*, std::shared_ptr<Stream>> handles_;
  std::vector<std::shared_ptr<Stream>> running_;  // also destroyed ones with unfinished jobs
  std::shared_ptr<Stream> legacy_;
  std::uint64_t seed_ = 0;
  std::int64_t jobs_ = 0;
};

}  // namespace fake
