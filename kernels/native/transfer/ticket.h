// Ticket of a submitted batch, and the hub that wakes its waiters.
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

class CudaEvent;
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
  // Bytes transferred so far: the bytes of completed pieces, and the bytes that a failed piece
  // transferred before its error.
  std::int64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }
  // Returns the time from submission to completion, in seconds; 0 while the ticket is unfinished.
  double seconds() const {
    return finished() ? std::chrono::duration<double>(ended_ - began_).count() : 0.0;
  }
  const Lane& lane() const { return *lane_; }
  // The batch. Valid only until the ticket is enqueued.
  const std::vector<Copy>& copies() const { return copies_; }
  // Valid only in state `failed`.
  const Failure& failure() const { return *failure_; }
  // Returns the region of this batch that contains `address`. Only for the lane,
  // while a piece is in flight.
  const Region& region_at(std::int64_t address) const { return *shared_region_at(address); }
  // Cancels the pieces that have not started. Returns false if there are none.
  bool cancel();

 private:
  friend class Lane;
  friend class Hub;
  friend class CudaLane;
  friend class Engine;
  friend class ThrottledLane;

  // Decrements the use counts of the regions and drops the references to them.
  void release();
  // Frees the batch and its events.
  void forget();
  const std::shared_ptr<Region>& shared_region_at(std::int64_t address) const;
  // Returns the regions of copy `op` with their use counts incremented, for a piece that is
  // submitted as a separate ticket.
  std::vector<std::shared_ptr<Region>> share_regions(std::size_t op) const;

  // Guarded by the lane's mutex until the state is published; not guarded afterwards.
  std::vector<Copy> copies_;
  std::size_t next_op_ = 0;
  std::int64_t next_position_ = 0;
  std::int64_t pieces_in_flight_ = 0;
  bool cancelled_ = false;
  bool in_line_ = false;
  std::list<std::shared_ptr<Ticket>>::iterator place_;
  std::optional<Failure> failure_;
  // CUDA lane: points that the copies wait for, the number of pieces in flight without an event
  // behind them, and the event behind the last piece that has one.
  std::vector<std::shared_ptr<CudaEvent>> after_;
  std::int64_t unmarked_ = 0;
  std::shared_ptr<CudaEvent> marked_;
  std::vector<std::shared_ptr<Region>> regions_;  // sorted by address
  // Called after the state is published, without locks held, by the thread that published it: a
  // worker of the lane, or the caller of enqueue(), cancel() or stop().
  std::function<void(const Ticket&)> on_finish_;

  const std::shared_ptr<Lane> lane_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point ended_;  // written before the state is published
  std::atomic<std::int64_t> bytes_done_{0};
  std::atomic<State> state_{State::pending};

  bool exhausted() const { return next_op_ == copies_.size(); }
  void drop_rest() { next_op_ = copies_.size(); }
};

// Publishes the completion of tickets and wakes the threads that wait for any of them.
class Hub {
 public:
  // Publishes the tickets in the given order: a thread that sees a ticket finished also sees the
  // earlier tickets finished. For the same reason, the lane holds its mutex during the call.
  void publish(const std::vector<std::shared_ptr<Ticket>>& tickets);

  // Waits until `over()` is true. Returns false if the deadline passes first.
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
