// Lane that emulates a slower device, for tests and benchmarks.
#pragma once

#include <condition_variable>
#include <queue>

#include "lane.h"

namespace sgl_ext::transfer {

// Emulates a single channel in front of the lane `inner`. Pieces pass through the channel one after
// the other. A piece takes bytes / rate, and the first piece of a copy takes at least 1 / IOPS: a
// copy counts as one operation, regardless of its number of rows and pieces. A piece completes
// `latency` after it has left the channel, or later if the inner lane is slower. Latencies overlap.
class ThrottledLane final : public Lane {
 public:
  struct Device {
    double bytes_per_second;  // infinity for no limit
    double operations_per_second;
    double latency;             // in seconds
  };

  // An urgent ticket waits for at most one piece of `piece_bytes` bytes to leave the channel. At
  // most `depth` pieces of each level are in flight.
  ThrottledLane(const std::shared_ptr<Hub>& hub, std::shared_ptr<Lane> inner, const Device& device,
                std::size_t depth, std::int64_t piece_bytes);

  const Device& device() const { return device_; }
  const std::shared_ptr<Lane>& inner() const { return inner_; }
  std::optional<std::string> refuses(const Copy& copy, const Region& src,
                                     const Region& dst) const override {
    return inner_->refuses(copy, src, dst);
  }
  std::vector<std::shared_ptr<CudaEvent>> points(
      const std::vector<std::uintptr_t>& streams) const override {
    return inner_->points(streams);
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
  // Guarded by mutex_: pieces that the inner lane has finished, and the number of pieces
  // that it has not finished yet.
  std::priority_queue<Passing, std::vector<Passing>, std::greater<>> passed_;
  std::size_t passing_ = 0;
};

}  // namespace sgl_ext::transfer
