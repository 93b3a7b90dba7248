#include "throttled_lane.h"

#include <sys/prctl.h>

#include <algorithm>
#include <utility>

namespace sgl_ext::transfer {

namespace {

// Longest oversleep of the thread for which later pieces compensate.
constexpr auto kBurst = std::chrono::milliseconds(2);

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

}  // namespace

ThrottledLane::ThrottledLane(const std::shared_ptr<Hub>& hub, std::shared_ptr<Lane> inner,
                             const Device& device, std::size_t depth, std::int64_t piece_bytes)
    : Lane("throttled " + inner->name(), hub),
      inner_(std::move(inner)),
      device_(device),
      depth_(depth),
      cut_{piece_bytes} {
  if (!inner_->publishes_to(*hub)) {
    throw std::invalid_argument("this " + inner_->name() + " belongs to another engine");
  }
  constexpr double kDay = 86400;
  if (!(device.bytes_per_second >= 1) || !(device.operations_per_second >= 1 / kDay) ||
      !(device.latency >= 0 && device.latency <= kDay)) {
    throw std::invalid_argument(
        "a device of " + std::to_string(device.bytes_per_second) + " bytes/s, " +
        std::to_string(device.operations_per_second) + " operations/s, " +
        std::to_string(device.latency) +
        " s latency; expected at least 1 byte/s, one operation a day, and 0 to 86400 s");
  }
  if (depth < 1 || piece_bytes < 4096 || piece_bytes % 4096 != 0) {
    throw std::invalid_argument("depth " + std::to_string(depth) + ", pieces of " +
                                std::to_string(piece_bytes) +
                                " bytes; expected at least 1, and a multiple of 4096");
  }
}

Clock::duration ThrottledLane::toll(const Piece& piece) const {
  double time = static_cast<double>(piece.bytes) / device_.bytes_per_second;
  if (piece.position == 0) time = std::max(time, 1 / device_.operations_per_second);
  constexpr double kCentury = 3.2e9;  // a longer duration would overflow the clock
  return seconds(std::min(time, kCentury));
}

unsigned ThrottledLane::admitted() const {
  unsigned levels = 0;
  for (std::size_t level = 0; level < kLevels; ++level) {
    if (in_flight(level).pieces < depth_) levels |= 1u << level;
  }
  return levels;
}

// Submits the piece to the inner lane as a separate ticket.
void ThrottledLane::pass(const Piece& piece, Deadline due) {
  std::vector<Copy> runs;
  each_run(piece, [&](const Copy& run, std::size_t) { runs.push_back(run); });
  auto ticket = std::make_shared<Ticket>(std::move(runs), piece.ticket->level, inner_,
                                         piece.ticket->share_regions(piece.op));
  // The first piece waits for the points, and the inner lane starts later pieces after it.
  ticket->after_ = std::exchange(piece.ticket->after_, {});
  ticket->on_finish_ = [this, piece, due](const Ticket& inner) {
    Outcome outcome{inner.bytes_done(), 0, {}};
    if (inner.state() == State::failed) {
      outcome.code = inner.failure().code;
      outcome.message = inner.failure().message;
    } else if (inner.state() == State::cancelled) {
      outcome.cancelled = true;
    }
    Lock lock(mutex_);
    --passing_;
    passed_.push({due, piece, std::move(outcome)});
    changed_.notify_one();
  };
  try {
    inner_->enqueue(ticket);
  } catch (const Refused&) {  // the inner lane is closed
    Lock lock(mutex_);
    --passing_;
    passed_.push({due, piece, {0, 0, {}, true}});
  }
}

void ThrottledLane::work(std::size_t) {
  ::prctl(PR_SET_TIMERSLACK, 1000);  // in ns; a toll may be a few microseconds
  Deadline free = Clock::now();      // when the channel becomes free
  Deadline last = free;              // when the channel was last seen with no work waiting
  for (;;) {
    std::vector<Passing> ended;
    Piece piece;
    bool took = false;
    Deadline due;
    {
      Lock lock(mutex_);
      const Deadline now = Clock::now();
      while (!passed_.empty() && (closing() || passed_.top().due <= now)) {
        ended.push_back(passed_.top());
        passed_.pop();
      }
      if (free <= now && take(piece, cut_, admitted())) {
        took = true;
        ++passing_;
        // Time in which no work was waiting is not credited to later pieces. The submission time of
        // the ticket is a bound too, because this thread may have slept since the last check.
        const Deadline began = std::max({free, last, piece.ticket->began_, now - kBurst});
        free = began + toll(piece);
        due = free + seconds(device_.latency);
      } else if (ended.empty()) {
        if (closing() && passing_ == 0 && passed_.empty()) return;
        const bool waiting = may_take(admitted());
        Deadline until = Deadline::max();
        if (!passed_.empty()) until = passed_.top().due;
        if (waiting) until = std::min(until, free);
        if (until == Deadline::max()) {
          changed_.wait(lock);
        } else {
          changed_.wait_until(lock, until);
        }
        if (!waiting) last = Clock::now();
        continue;
      }
    }
    if (took) pass(piece, due);
    for (Passing& one : ended) finish(one.piece, std::move(one.outcome));
  }
}

}  // namespace sgl_ext::transfer
