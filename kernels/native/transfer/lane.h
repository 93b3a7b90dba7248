// Priority queue of tickets and the worker threads that execute them.
#pragma once

#include <array>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ticket.h"

namespace sgl_ext::transfer {

// Unit of work: `bytes` consecutive bytes of a ticket's copies, starting at byte `position` of copy
// `op`. The ticket outlives its pieces.
struct Piece {
  Ticket* ticket = nullptr;
  std::size_t op = 0;
  std::int64_t position = 0;
  std::int64_t bytes = 0;
};

// Limits on the size of a piece. A row wider than `bytes` is split; other rows are kept whole.
struct Cut {
  std::int64_t bytes;
  std::size_t runs = 1;                           // strided runs per piece, each within one copy
  std::int64_t rows = std::int64_t{1} << 62;      // rows per run
};

struct Outcome {
  std::int64_t bytes = 0;
  int code = 0;
  std::string message = {};
  bool cancelled = false;  // the piece was not completed; the rest of its ticket is dropped
};

// Returns the longest run of at most `bytes` bytes and `rows` rows that starts at
// byte `position` of `copy`.
Copy run_from(const Copy& copy, std::int64_t position, std::int64_t bytes, std::int64_t rows);

// Executes tickets in order of priority. Tickets of one level start, and are reported as finished,
// in submission order, except that a cancelled ticket waits only for its own pieces in flight.
// Pieces of several tickets may be in flight at once: a caller must wait for a ticket before it
// submits a copy that depends on it.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  Lane(std::string name, std::shared_ptr<Hub> hub);
  virtual ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const std::string& name() const { return name_; }
  bool publishes_to(const Hub& hub) const { return hub_.get() == &hub; }
  // Returns the reason if this lane does not support a copy between these regions, else nullopt.
  virtual std::optional<std::string> refuses(const Copy& copy, const Region& src,
                                             const Region& dst) const = 0;
  // Add and remove a pinned region; adding may throw Refused. No unfinished ticket uses the region
  // when it is removed, which has no effect if the region was not added.
  virtual void attach(const Region&) {}
  virtual void detach(const Region&) {}

  // Returns the points that the work of CUDA streams has reached, for copies that wait for them.
  // Throws std::invalid_argument if there are streams and the lane cannot wait for them.
  virtual std::vector<std::shared_ptr<CudaEvent>> points(
      const std::vector<std::uintptr_t>& streams) const;
  // Makes work that is submitted to a CUDA stream from now on wait for the copies of `ticket`, as
  // soon as all of them are dispatched. Returns false if the ticket is finished, was cancelled or
  // has failed, if the deadline passes first, or if the lane has no CUDA streams.
  virtual bool fence(Ticket&, std::uintptr_t, Deadline) { return false; }

  virtual void start() = 0;
  void enqueue(const std::shared_ptr<Ticket>& ticket);
  bool cancel(Ticket& ticket);
  // Rejects new tickets and cancels the pieces that have not started.
  void stop();
  // After stop(): waits until the pieces in flight are complete and joins the threads. Returns
  // false if the deadline passes first; may then be called again.
  bool join(Deadline deadline);

 protected:
  using Lock = std::unique_lock<std::mutex>;

  // Starts `count` threads; thread i runs `work(i)` until it returns.
  void start_threads(std::size_t count);
  virtual void work(std::size_t thread) = 0;
  // Wakes the threads that a new ticket needs. Called with mutex_ held.
  virtual void work_came(const Ticket& ticket) = 0;
  // Wakes all threads because the lane is closing or a ticket was cancelled. Called with mutex_ held.
  virtual void wake_all() = 0;

  // Takes the next piece of the most urgent level in the bit mask `levels`. Returns false if there
  // is none. Called with mutex_ held.
  bool take(Piece& piece, const Cut& cut, unsigned levels = 7);
  // Returns whether take() would find a piece at these levels. Called with mutex_ held.
  bool may_take(unsigned levels) const;
  bool closing() const { return closing_; }
  // Reports the outcome of a piece and publishes the tickets that it finishes.
  // Called without mutex_ held.
  void finish(const Piece& piece, Outcome outcome);
  // Records the failure of a piece, unless its ticket has failed before, and drops the pieces that
  // have not started. Called with mutex_ held.
  static void fail(const Piece& piece, const Outcome& outcome);

  // Calls `use(run, op)` for each run of a piece.
  template <class Use>
  static void each_run(const Piece& piece, Use use) {
    std::size_t op = piece.op;
    std::int64_t position = piece.position;
    for (std::int64_t left = piece.bytes; left > 0;) {
      const Copy& copy = piece.ticket->copies_[op];
      const Copy run = run_from(copy, position, left, Cut{0}.rows);
      use(run, op);
      left -= run.bytes();
      position += run.bytes();
      if (position == copy.bytes()) ++op, position = 0;
    }
  }

  struct Load {
    std::size_t pieces = 0;
    std::int64_t bytes = 0;
  };
  const Load& in_flight(std::size_t level) const { return in_flight_[level]; }

  mutable std::mutex mutex_;

 private:
  using Line = std::list<std::shared_ptr<Ticket>>;
  using Ended = std::vector<std::shared_ptr<Ticket>>;

  bool over(const Ticket& ticket) const {
    return ticket.exhausted() && ticket.pieces_in_flight_ == 0;
  }
  void leave(Line::iterator place, Ended& ended);
  void settle(Ticket& ticket, Ended& ended);
  // Frees the batches of published tickets and runs their callbacks. Called without mutex_ held.
  static void conclude(const Ended& ended);

  const std::string name_;
  const std::shared_ptr<Hub> hub_;
  // Unfinished tickets by level, and an iterator into each list that no ticket with pieces left
  // precedes.
  std::array<Line, kLevels> line_;
  std::array<Line::iterator, kLevels> next_;
  std::array<Load, kLevels> in_flight_;
  bool closing_ = false;

  std::mutex joining_;  // serializes concurrent calls of join()
  std::vector<std::thread> threads_;
  std::size_t running_ = 0;
  std::condition_variable ended_;
};

}  // namespace sgl_ext::transfer
