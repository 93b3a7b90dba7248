#include "lane.h"

#include <algorithm>

#include "cuda_runtime.h"
#include "threads.h"

namespace sgl_ext::transfer {

Copy run_from(const Copy& copy, std::int64_t position, std::int64_t bytes, std::int64_t rows) {
  const std::int64_t row = position / copy.width, column = position % copy.width;
  Copy run = copy;
  run.src += row * copy.src_pitch + column;
  run.dst += row * copy.dst_pitch + column;
  if (column != 0 || copy.width > bytes) {
    run.width = std::min(copy.width - column, bytes);
    run.height = 1;
  } else {
    run.height = std::min({copy.height - row, bytes / copy.width, rows});
  }
  return run;
}

Lane::Lane(std::string name, std::shared_ptr<Hub> hub)
    : name_(std::move(name)), hub_(std::move(hub)) {
  for (std::size_t level = 0; level < kLevels; ++level) next_[level] = line_[level].end();
}

Lane::~Lane() = default;

std::vector<std::shared_ptr<CudaEvent>> Lane::points(
    const std::vector<std::uintptr_t>& streams) const {
  if (streams.empty()) return {};
  throw std::invalid_argument("a " + name_ + " cannot wait for CUDA streams");
}

void Lane::start_threads(std::size_t count) {
  std::lock_guard lock(mutex_);
  try {
    for (std::size_t i = 0; i < count; ++i) {
      threads_.push_back(start_thread([this, i] {
        work(i);
        std::lock_guard end(mutex_);
        --running_;
        ended_.notify_all();
      }));
      ++running_;
    }
  } catch (const std::system_error& error) {
    throw Refused("thread " + std::to_string(threads_.size()) + " of " + std::to_string(count) +
                  " could not be started (" + error.what() + "); request fewer threads");
  }
}

void Lane::enqueue(const std::shared_ptr<Ticket>& ticket) {
  Ended ended;
  {
    Lock lock(mutex_);
    if (closing_) throw Refused(name_ + " is closed");
    const auto level = static_cast<std::size_t>(ticket->level);
    Line& line = line_[level];
    ticket->place_ = line.insert(line.end(), ticket);
    ticket->in_line_ = true;
    if (ticket->exhausted()) {
      settle(*ticket, ended);
    } else {
      if (next_[level] == line.end()) next_[level] = ticket->place_;
      work_came(*ticket);
    }
    hub_->publish(ended);
  }
  conclude(ended);
}

bool Lane::take(Piece& piece, const Cut& cut, unsigned levels) {
  for (std::size_t level = kLevels; level-- > 0;) {
    if (!(levels >> level & 1)) continue;
    auto& next = next_[level];
    while (next != line_[level].end() && (*next)->exhausted()) ++next;
    if (next == line_[level].end()) continue;
    Ticket& ticket = **next;
    piece = {&ticket, ticket.next_op_, ticket.next_position_, 0};
    for (std::size_t runs = 0; runs < cut.runs && !ticket.exhausted(); ++runs) {
      const Copy& copy = ticket.copies_[ticket.next_op_];
      const std::int64_t left = cut.bytes - piece.bytes;
      // The remaining budget must not split a row that a full budget would keep whole.
      if (piece.bytes > 0 && left < std::min(copy.width, cut.bytes)) break;
      const std::int64_t bytes =
          run_from(copy, ticket.next_position_, left, cut.rows).bytes();
      piece.bytes += bytes;
      ticket.next_position_ += bytes;
      if (ticket.next_position_ == copy.bytes()) ++ticket.next_op_, ticket.next_position_ = 0;
    }
    ++ticket.pieces_in_flight_;
    ++in_flight_[level].pieces;
    in_flight_[level].bytes += piece.bytes;
    return true;
  }
  return false;
}

bool Lane::may_take(unsigned levels) const {
  for (std::size_t level = 0; level < kLevels; ++level) {
    const auto more = [](const auto& ticket) { return !ticket->exhausted(); };
    if ((levels >> level & 1) && std::any_of(Line::const_iterator(next_[level]),
                                             line_[level].end(), more)) {
      return true;
    }
  }
  return false;
}

void Lane::fail(const Piece& piece, const Outcome& outcome) {
  Ticket& ticket = *piece.ticket;
  if (!ticket.failure_) ticket.failure_ = Failure{outcome.code, piece.op, outcome.message};
  ticket.drop_rest();
}

void Lane::finish(const Piece& piece, Outcome outcome) {
  Ended ended;
  {
    Lock lock(mutex_);
    Ticket& ticket = *piece.ticket;
    Load& load = in_flight_[static_cast<std::size_t>(ticket.level)];
    --load.pieces;
    load.bytes -= piece.bytes;
    --ticket.pieces_in_flight_;
    ticket.bytes_done_.fetch_add(outcome.bytes, std::memory_order_relaxed);
    if (outcome.code != 0) fail(piece, outcome);
    if (outcome.cancelled) {
      ticket.cancelled_ = true;
      ticket.drop_rest();
    }
    settle(ticket, ended);
    hub_->publish(ended);
  }
  conclude(ended);
}

bool Lane::cancel(Ticket& ticket) {
  Ended ended;
  {
    Lock lock(mutex_);
    if (!ticket.in_line_ || ticket.exhausted()) return false;
    ticket.cancelled_ = true;
    ticket.drop_rest();
    settle(ticket, ended);
    hub_->publish(ended);
    wake_all();
  }
  conclude(ended);
  return true;
}

void Lane::leave(Line::iterator place, Ended& ended) {
  Ticket& ticket = **place;
  const auto level = static_cast<std::size_t>(ticket.level);
  if (next_[level] == place) ++next_[level];
  ticket.in_line_ = false;
  ended.push_back(std::move(*place));
  line_[level].erase(place);
}

void Lane::settle(Ticket& ticket, Ended& ended) {
  Line& line = line_[static_cast<std::size_t>(ticket.level)];
  if (ticket.cancelled_ && over(ticket)) leave(ticket.place_, ended);
  while (!line.empty() && over(*line.front())) leave(line.begin(), ended);
}

void Lane::conclude(const Ended& ended) {
  for (const auto& ticket : ended) {
    ticket->forget();
    if (ticket->on_finish_) ticket->on_finish_(*ticket);
  }
}

void Lane::stop() {
  Ended ended;
  {
    Lock lock(mutex_);
    closing_ = true;
    for (Line& line : line_) {
      for (auto place = line.begin(); place != line.end();) {
        Ticket& ticket = **place++;
        if (ticket.exhausted()) continue;
        ticket.cancelled_ = true;
        ticket.drop_rest();
        if (over(ticket)) leave(ticket.place_, ended);
      }
      while (!line.empty() && over(*line.front())) leave(line.begin(), ended);
    }
    wake_all();
    hub_->publish(ended);
  }
  conclude(ended);
}

bool Lane::join(Deadline deadline) {
  {
    Lock lock(mutex_);
    if (!ended_.wait_until(lock, deadline, [this] { return running_ == 0; })) return false;
  }
  std::lock_guard lock(joining_);
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return true;
}

}  // namespace sgl_ext::transfer
