// A queue of tickets with urgency, and the threads that carry them out.
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

// Consecutive bytes of a ticket's copies, beginning `position` bytes into copy `op`. The ticket
// outlives its pieces.
struct Piece {
  Ticket* ticket = nullptr;
  std::size_t op = 0;
  std::int64_t position = 0;
  std::int64_t bytes = 0;
};

// How large a piece may be. A row wider than `bytes` is cut, others are kept whole.
struct Cut {
  std::int64_t bytes;
  std::size_t runs = 1;                           // strided runs, each within one copy
  std::int64_t rows = std::int64_t{1} << 62;      // of a run
};

struct Outcome {
  std::int64_t bytes = 0;
  int code = 0;
  std::string message = {};
  bool cancelled = false;  // the piece was not carried out, and nor is the rest of its ticket
};

// The longest run of at most `bytes` bytes and `rows` rows from `position` in `copy`.
Copy run_from(const Copy& copy, std::int64_t position, std::int64_t bytes, std::int64_t rows);

// Tickets of a level start in the order of submission and are reported finished in that order,
// except that a cancelled one waits only for its own pieces in flight. Pieces of several tickets
// are in flight at once: a copy that depends on another's bytes is submitted after waiting.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  Lane(std::string name, std::shared_ptr<Hub> hub);
  virtual ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const std::string& name() const { return name_; }
  bool publishes_to(const Hub& hub) const { return hub_.get() == &hub; }
  // Why this lane cannot carry out the copy between these regions, if it cannot.
  virtual std::optional<std::string> refuses(const Copy& copy, const Region& src,
                                             const Region& dst) const = 0;
  // A pinned region comes or goes; no unfinished ticket uses it.
  virtual void attach(const Region&) {}
  virtual void detach(const Region&) {}

  virtual void start() = 0;
  void enqueue(const std::shared_ptr<Ticket>& ticket);
  bool cancel(Ticket& ticket);
  // Refuses new tickets and cancels what has not started.
  void stop();
  // After stop(): waits for what has started and joins the threads. False if that took longer; may
  // be called again.
  bool join(Deadline deadline);

 protected:
  using Lock = std::unique_lock<std::mutex>;

  // Starts `count` threads that run `work(0..count)` until they return.
  void start_threads(std::size_t count);
  virtual void work(std::size_t thread) = 0;
  // Wakes the threads that a new ticket needs. Holds mutex_.
  virtual void work_came(const Ticket& ticket) = 0;
  // Wakes every thread: the lane is closing. Holds mutex_.
  virtual void wake_all() = 0;

  // The next piece of the most urgent level in `levels` (a bit each). Holds mutex_.
  bool take(Piece& piece, const Cut& cut, unsigned levels = 7);
  // Whether take() of these levels would find a piece. Holds mutex_.
  bool may_take(unsigned levels) const;
  bool closing() const { return closing_; }
  // Gives back a piece. Without mutex_.
  void finish(const Piece& piece, Outcome outcome);

  // Calls `use(run, op)` for the runs of a piece.
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
  // What is left to do for published tickets. Without mutex_.
  static void conclude(const Ended& ended);

  const std::string name_;
  const std::shared_ptr<Hub> hub_;
  // Unfinished tickets by level, and a place in each that no ticket with pieces left is before.
  std::array<Line, kLevels> line_;
  std::array<Line::iterator, kLevels> next_;
  std::array<Load, kLevels> in_flight_;
  bool closing_ = false;

  std::mutex joining_;  // two may close at once
  std::vector<std::thread> threads_;
  std::size_t running_ = 0;
  std::condition_variable ended_;
};

}  // namespace sgl_ext::transfer
