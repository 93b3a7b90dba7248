#include "cuda_lane.h"

#include <algorithm>

namespace sgl_ext::transfer {

CudaLane::CudaLane(std::shared_ptr<Hub> hub, const std::string& library, int device,
                   const Limits& limits)
    : Lane("CUDA lane", std::move(hub)),
      runtime_(library, device),
      device_(device),
      limits_(limits) {
  if (limits.dispatches < 1 || limits.bytes < 4096) {
    throw std::invalid_argument("an event after " + std::to_string(limits.dispatches) +
                                " dispatches or " + std::to_string(limits.bytes) +
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

int CudaLane::dispatch(const Piece& piece, CudaRuntime::Stream stream) {
  int error = 0;
  each_run(piece, [&](const Copy& run, std::size_t) {
    auto* dst = reinterpret_cast<void*>(run.dst);
    const auto* src = reinterpret_cast<const void*>(run.src);
    const auto width = static_cast<std::size_t>(run.width);
    error = run.height == 1
                ? runtime_.memcpy_async(dst, src, width, CudaRuntime::kMemcpyDefault, stream)
                : runtime_.memcpy_2d_async(dst, static_cast<std::size_t>(run.dst_pitch), src,
                                           static_cast<std::size_t>(run.src_pitch), width,
                                           static_cast<std::size_t>(run.height),
                                           CudaRuntime::kMemcpyDefault, stream);
  });
  return error;
}

Outcome CudaLane::outcome(const Piece& piece, int error, const char* doing) const {
  if (error == 0) return {piece.bytes, 0, {}};
  runtime_.get_last_error();  // clears a non-sticky error, so that the next caller does not see it
  return {0, error, std::string(doing) + ": " + runtime_.error_string(error)};
}

void CudaLane::record(Group& group, CudaRuntime::Stream stream) {
  group.error = runtime_.event_create(
      &group.event, CudaRuntime::kEventBlockingSync | CudaRuntime::kEventDisableTiming);
  if (group.error == 0) group.error = runtime_.event_record(group.event, stream);
  // Without an event, only synchronizing the stream shows that the memory is no longer in use.
  if (group.error != 0) runtime_.stream_synchronize(stream);
}

void CudaLane::complete(Group& group) {
  const int error = group.error ? group.error : runtime_.event_synchronize(group.event);
  if (group.event) runtime_.event_destroy(group.event);
  for (const Piece& piece : group.pieces) {
    finish(piece, outcome(piece, error, "waiting for the copy"));
  }
}

void CudaLane::work(std::size_t level) {
  const Cut cut{limits_.bytes};
  CudaRuntime::Stream stream = nullptr;
  int least = 0, greatest = 0;
  int broken = runtime_.set_device(device_);
  if (broken == 0) broken = runtime_.stream_priority_range(&least, &greatest);
  if (broken == 0) {
    // A lower number is a higher priority. A device may have fewer priorities than there are
    // levels.
    const int priority = std::max(greatest, least - static_cast<int>(level));
    broken = runtime_.stream_create(&stream, CudaRuntime::kStreamNonBlocking, priority);
  }
  Group open;
  std::deque<Group> outstanding;
  for (;;) {
    Piece piece;
    bool took;
    {
      Lock lock(mutex_);
      took = take(piece, cut, 1u << level);
      if (!took && open.pieces.empty() && outstanding.empty()) {
        if (closing()) break;
        came_.wait(lock);
        continue;
      }
    }
    if (took) {
      if (const int error = broken ? broken : dispatch(piece, stream); error != 0) {
        finish(piece, outcome(piece, error, broken ? "creating a stream" : "dispatching the copy"));
      } else {
        open.bytes += piece.bytes;
        open.pieces.push_back(piece);
      }
    }
    const bool full = open.pieces.size() >= limits_.dispatches || open.bytes >= limits_.bytes;
    if (!open.pieces.empty() && (full || !took)) {
      record(open, stream);
      outstanding.push_back(std::move(open));
      open = Group{};
    }
    while (!outstanding.empty() && (outstanding.size() >= limits_.events || !took)) {
      complete(outstanding.front());
      outstanding.pop_front();
      if (!took) break;  // looks for work that arrived in the meantime
    }
  }
  if (stream) runtime_.stream_destroy(stream);
}

}  // namespace sgl_ext::transfer
