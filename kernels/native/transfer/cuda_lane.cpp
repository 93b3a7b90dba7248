#include "cuda_lane.h"

#include <algorithm>
#include <utility>

namespace sgl_ext::transfer {

CudaLane::CudaLane(std::shared_ptr<Hub> hub, const std::string& library, int device,
                   const Limits& limits)
    : Lane("CUDA lane", std::move(hub)),
      runtime_(library, device),
      device_(device),
      limits_(limits),
      batches_(runtime_.copies_batches()) {
  if (limits.dispatches < 1 || limits.bytes < 4096) {
    throw std::invalid_argument("pieces of " + std::to_string(limits.dispatches) +
                                " dispatches and " + std::to_string(limits.bytes) +
                                " bytes; expected at least 1 and 4096");
  }
}

std::optional<std::string> CudaLane::refuses(const Copy&, const Region& src,
                                             const Region& dst) const {
  for (const Region* region : {&src, &dst}) {
    if (region->kind == Kind::file) {
      return region->describe() + " cannot be accessed by a CUDA lane, which copies memory";
    }
  }
  return std::nullopt;
}

void CudaLane::attach(const Region& region) {
  if (region.kind != Kind::host) return;
  const int error = runtime_.host_register(reinterpret_cast<void*>(region.base),
                                           static_cast<std::size_t>(region.length),
                                           CudaRuntime::kHostRegisterPortable);
  if (error == 0) {
    const Lock lock(mutex_);
    attached_.insert(region.id);
    return;
  }
  runtime_.get_last_error();
  throw Refused("the CUDA runtime cannot pin " + std::to_string(region.length) +
                " bytes of host memory: " + runtime_.error_string(error) +
                "; use less memory or raise the limit of locked memory (ulimit -l)");
}

void CudaLane::detach(const Region& region) {
  {
    const Lock lock(mutex_);
    if (attached_.erase(region.id) == 0) return;
  }
  runtime_.host_unregister(reinterpret_cast<void*>(region.base));
}

std::vector<std::shared_ptr<CudaEvent>> CudaLane::points(
    const std::vector<std::uintptr_t>& streams) const {
  std::vector<std::shared_ptr<CudaEvent>> found;
  for (const std::uintptr_t stream : streams) {
    found.push_back(std::make_shared<CudaEvent>(runtime_));
    if (const int error = found.back()->record(reinterpret_cast<CudaRuntime::Stream>(stream))) {
      runtime_.get_last_error();
      throw Refused(std::string("an event could not be recorded on a CUDA stream: ") +
                    runtime_.error_string(error));
    }
  }
  return found;
}

bool CudaLane::fence(Ticket& ticket, std::uintptr_t stream, Deadline deadline) {
  Lock lock(mutex_);
  Channel& channel = channels_[static_cast<std::size_t>(ticket.level)];
  ++channel.fences;
  changed_.notify_all();
  const bool dispatched = changed_.wait_until(lock, deadline, [&] {
    return ticket.finished() || (ticket.exhausted() && ticket.unmarked_ == 0);
  });
  --channel.fences;
  if (!dispatched || ticket.finished() || ticket.cancelled_ || ticket.failure_) return false;
  if (!ticket.marked_) return false;  // nothing to copy; it finishes after earlier tickets
  return ticket.marked_->fence(reinterpret_cast<CudaRuntime::Stream>(stream)) == 0;
}

int CudaLane::copy(const Copy& run, CudaRuntime::Stream stream) const {
  auto* dst = reinterpret_cast<void*>(run.dst);
  const auto* src = reinterpret_cast<const void*>(run.src);
  const auto width = static_cast<std::size_t>(run.width);
  if (run.height == 1) {
    return runtime_.memcpy_async(dst, src, width, CudaRuntime::kMemcpyDefault, stream);
  }
  return runtime_.memcpy_2d_async(dst, static_cast<std::size_t>(run.dst_pitch), src,
                                  static_cast<std::size_t>(run.src_pitch), width,
                                  static_cast<std::size_t>(run.height),
                                  CudaRuntime::kMemcpyDefault, stream);
}

int CudaLane::copy_all(const std::vector<Copy>& rows, CudaRuntime::Stream stream) const {
  std::vector<void*> dsts;
  std::vector<const void*> srcs;
  std::vector<std::size_t> sizes;
  for (const Copy& row : rows) {
    dsts.push_back(reinterpret_cast<void*>(row.dst));
    srcs.push_back(reinterpret_cast<const void*>(row.src));
    sizes.push_back(static_cast<std::size_t>(row.width));
  }
  return runtime_.copy_all(dsts.data(), srcs.data(), sizes.data(), rows.size(), stream);
}

int CudaLane::copy(const Piece& piece, CudaRuntime::Stream stream, std::size_t& failed,
                   std::int64_t& copied) {
  std::vector<Copy> rows;
  std::vector<std::size_t> ops;
  int error = 0;
  const auto one = [&](const Copy& run, std::size_t op) {
    if (error != 0) return;
    error = copy(run, stream);
    if (error != 0) {
      failed = op;
    } else {
      copied += run.bytes();
    }
  };
  const bool batches = batches_;
  each_run(piece, [&](const Copy& run, std::size_t op) {
    if (!batches || run.height > 1) return one(run, op);
    rows.push_back(run);
    ops.push_back(op);
  });
  if (error == 0 && rows.size() > 1) {
    switch (error = copy_all(rows, stream)) {
      case 0:
        for (const Copy& row : rows) copied += row.bytes();
        return 0;
      case CudaRuntime::kInvalidValue:
      case CudaRuntime::kNewerDriver:
      case CudaRuntime::kNotSupported:
        // The driver does not know the call, or does not batch copies of this memory.
        runtime_.get_last_error();
        batches_ = false;
        error = 0;
        break;
      default:
        failed = ops[0];
        return error;
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) one(rows[i], ops[i]);
  return error;
}

Outcome CudaLane::failure(std::int64_t bytes, int error, const char* doing) const {
  runtime_.get_last_error();  // clears a non-sticky error, so that the next caller does not see it
  return {bytes, error, std::string(doing) + ": " + runtime_.error_string(error)};
}

void CudaLane::begin(const Piece& piece, CudaRuntime::Stream stream, int error) {
  const char* doing = "creating a stream";
  if (error == 0) {
    doing = "waiting for other streams";
    // Later pieces follow on the same stream. Only this thread uses the points of the ticket.
    for (const auto& point : std::exchange(piece.ticket->after_, {})) {
      if (error == 0) error = point->fence(stream);
    }
  }
  Piece failed = piece;
  std::int64_t copied = 0;
  if (error == 0) {
    doing = "dispatching the copies";
    error = copy(piece, stream, failed.op, copied);
  }
  const auto event = std::make_shared<CudaEvent>(runtime_);
  if (error == 0) {
    doing = "waiting for the copy";
    error = event->record(stream);
  }
  // Without an event, only synchronizing the stream shows that the memory is no longer in use.
  if (error != 0 && stream) runtime_.stream_synchronize(stream);
  Outcome outcome;
  if (error != 0) outcome = failure(copied, error, doing);
  {
    Lock lock(mutex_);
    --piece.ticket->unmarked_;
    if (error != 0) {
      // A fence must neither wait for the other pieces nor take the ticket for dispatched until
      // `finish` drops them.
      fail(failed, outcome);
    } else {
      piece.ticket->marked_ = event;
      channels_[static_cast<std::size_t>(piece.ticket->level)].in_flight.push_back({piece, event});
    }
    changed_.notify_all();
  }
  if (error != 0) finish(failed, std::move(outcome));
}

void CudaLane::dispatch(std::size_t level) {
  CudaRuntime::Stream stream = nullptr;
  int least = 0, greatest = 0;
  int error = runtime_.set_device(device_);
  if (error == 0) error = runtime_.stream_priority_range(&least, &greatest);
  if (error == 0) {
    // A lower number is a higher priority. A device may have fewer priorities than there are
    // levels.
    const int priority = std::max(greatest, least - static_cast<int>(level));
    error = runtime_.stream_create(&stream, CudaRuntime::kStreamNonBlocking, priority);
  }
  const Cut cut{limits_.bytes, limits_.dispatches};
  const unsigned levels = 1u << level;
  Channel& channel = channels_[level];
  for (;;) {
    Piece piece;
    {
      Lock lock(mutex_);
      const auto admits = [&] {
        return level == kLevels - 1 || channel.fences > 0 ||
               channel.in_flight.size() < limits_.pieces;
      };
      changed_.wait(lock, [&] { return closing() || (admits() && may_take(levels)); });
      // A lane that is closing has dropped the pieces that have not started.
      if (!take(piece, cut, levels)) break;
      ++piece.ticket->unmarked_;
    }
    begin(piece, stream, error);
  }
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return channel.in_flight.empty(); });
  channel.dispatching = false;
  changed_.notify_all();
  lock.unlock();
  if (stream) runtime_.stream_destroy(stream);
}

void CudaLane::complete(std::size_t level) {
  runtime_.set_device(device_);
  Channel& channel = channels_[level];
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !channel.in_flight.empty() || !channel.dispatching; });
    if (channel.in_flight.empty()) return;
    const Piece piece = channel.in_flight.front().piece;
    const CudaEvent& event = *channel.in_flight.front().event;
    lock.unlock();
    const int error = event.synchronize();
    lock.lock();
    channel.in_flight.pop_front();
    lock.unlock();
    finish(piece, error ? failure(0, error, "waiting for the copy")
                        : Outcome{piece.bytes, 0, {}});
    lock.lock();
    changed_.notify_all();
  }
}

}  // namespace sgl_ext::transfer
