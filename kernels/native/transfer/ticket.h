// One submitted batch, and where its waiters wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "regions.h"
#include "types.h"

namespace sgl_ext::transfer {

class Lane;

class Ticket {
 public:
  Ticket(std::vector<Copy> batch, Level level, std::shared_ptr<Lane> lane,
         std::vector<std::shared_ptr<Region>> used);
  ~Ticket();

  const Level level;
  const std::size_t op_count;
  const std::int64_t bytes_total;

  State state() const { return state_.load(std::memory_order_acquire); }
  bool finished() const { return state() != State::pending; }
  // Bytes of the pieces that have ended without an error, and of the good part of the one that
  // did not.
  std::int64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }
  // From submission until the end; 0 before.
  double seconds() const {
    return finished() ? std::chrono::duration<double>(ended_ - began_).count() : 0.0;
  }
  const Lane& lane() const { return *lane_; }
  // The batch, until it is enqueued.
  const std::vector<Copy>& copies() const { return copies_; }
  // Valid once the state is `failed`.
  const Failure& failure() const { return *failure_; }
  // The region of this batch that holds `address`. For its lane, while a piece is in flight.
  const Region& region_at(std::int64_t address) const { return *shared_region_at(address); }
  // Whether anything that had not started was cancelled by this call.
  bool cancel();

 private:
  friend class Lane;
  friend class Hub;
  friend class ThrottledLane;

  // Gives the regions back.
  void release();
  // Frees the batch.
  void forget() { std::vector<Copy>().swap(copies_); }
  const std::shared_ptr<Region>& shared_region_at(std::int64_t address) const;
  // The regions of copy `op`, once more in use: for a piece that becomes a ticket of its own.
  std::vector<std::shared_ptr<Region>> share_regions(std::size_t op) const;

  // Guarded by the lane's mutex until the state is published; nobody's afterwards.
  std::vector<Copy> copies_;
  std::size_t next_op_ = 0;
  std::int64_t next_position_ = 0;
  std::int64_t pieces_in_flight_ = 0;
  bool cancelled_ = false;
  bool in_line_ = false;
  std::list<std::shared_ptr<Ticket>>::iterator place_;
  std::optional<Failure> failure_;
  std::vector<std::shared_ptr<Region>> regions_;  // by address
  // Runs on a thread of the lane, without locks, after the state is published.
  std::function<void(const Ticket&)> on_finish_;

  const std::shared_ptr<Lane> lane_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point ended_;  // written before the state is published
  std::atomic<std::int64_t> bytes_done_{0};
  std::atomic<State> state_{State::pending};

  bool exhausted() const { return next_op_ == copies_.size(); }
  void drop_rest() { next_op_ = copies_.size(); }
};

// Publishes the ends of tickets to those who wait for any of them.
class Hub {
 public:
  // In this order, so that who sees one finished sees those before it finished. For the same
  // reason the lane holds its mutex until its tickets are published.
  void publish(const std::vector<std::shared_ptr<Ticket>>& tickets);

  // True when `over()` became true before the deadline.
  template <class Over>
  bool wait(Over over, Deadline deadline) {
    if (over()) return true;
    std::unique_lock lock(mutex_);
    ++waiters_;
    const bool result = finished_.wait_until(lock, deadline, over);
    --waiters_;
    return result;
  }

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  std::size_t waiters_ = 0;
};

}  // namespace sgl_ext::transfer
