// A slower device than the one there is, for tests and benchmarks.
#pragma once

#include <condition_variable>
#include <queue>

#include "lane.h"

namespace sgl_ext::transfer {

// Emulates one channel in front of another lane: copies pass one after the other, each taking the
// longer of bytes / rate and 1 / IOPS, and are finished `latency` after they passed. A copy counts
// as one operation, however many rows it has and pieces it is cut into. Latencies overlap.
class ThrottledLane final : public Lane {
 public:
  struct Device {
    double bytes_per_second;  // infinity: not limited
    double operations_per_second;
    double latency;             // seconds
  };

  // An urgent ticket waits for at most one piece of `piece_bytes` to pass, and finds at most
  // `depth` pieces of each level on their way.
  ThrottledLane(const std::shared_ptr<Hub>& hub, std::shared_ptr<Lane> inner, const Device& device,
                std::size_t depth, std::int64_t piece_bytes);

  const Device& device() const { return device_; }
  const std::shared_ptr<Lane>& inner() const { return inner_; }
  std::optional<std::string> refuses(const Copy& copy, const Region& src,
                                     const Region& dst) const override {
    return inner_->refuses(copy, src, dst);
  }
  void start() override { start_threads(1); }

 protected:
  void work(std::size_t thread) override;
  void work_came(const Ticket&) override { changed_.notify_one(); }
  void wake_all() override { changed_.notify_one(); }

 private:
  struct Passing {
    Deadline due;
    Piece piece;
    Outcome outcome;
    bool operator>(const Passing& other) const { return due > other.due; }
  };

  Clock::duration toll(const Piece& piece) const;
  void pass(const Piece& piece, Deadline due);
  unsigned admitted() const;

  const std::shared_ptr<Lane> inner_;
  const Device device_;
  const std::size_t depth_;
  const Cut cut_;
  std::condition_variable changed_;
  // Guarded by mutex_: pieces the inner lane has carried out, and how many it has not yet.
  std::priority_queue<Passing, std::vector<Passing>, std::greater<>> passed_;
  std::size_t passing_ = 0;
};

}  // namespace sgl_ext::transfer
