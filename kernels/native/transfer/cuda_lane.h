// Lane that copies with the copy engines of a CUDA device (FastSwitch, section 3.2).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <set>

#include "cuda_runtime.h"
#include "lane.h"

namespace sgl_ext::transfer {

class CudaLane final : public Lane {
 public:
  struct Limits {
    std::size_t dispatches;  // copies of one piece
    std::int64_t bytes;      // bytes of one piece
    std::size_t pieces = 2;  // pieces in flight per level, except the most urgent one
  };

  // Each level has its own stream, a thread that dispatches its pieces and a thread that waits for
  // them. An event follows each piece. The work in flight per level is bounded, so that a more
  // urgent copy waits for that much work and not for everything submitted before it. Nothing
  // overtakes the most urgent level, so all of its work is dispatched at once.
  CudaLane(std::shared_ptr<Hub> hub, const std::string& library, int device,
           const Limits& limits);

  const std::string& library() const { return runtime_.library; }
  int device() const { return device_; }
  std::optional<std::string> refuses(const Copy&, const Region& src,
                                     const Region& dst) const override;
  // Registers pinned host memory with the runtime: copies from and to other host memory are neither
  // asynchronous nor fast. Throws Refused if the runtime cannot pin it.
  void attach(const Region& region) override;
  void detach(const Region& region) override;
  // The streams belong to the lane's device, which is the current one of the calling thread.
  std::vector<std::shared_ptr<CudaEvent>> points(
      const std::vector<std::uintptr_t>& streams) const override;
  // Limits on work in flight do not hold for tickets that a caller waits for here.
  bool fence(Ticket& ticket, std::uintptr_t stream, Deadline deadline) override;
  void start() override { start_threads(2 * kLevels); }

 protected:
  void work(std::size_t thread) override {
    thread < kLevels ? dispatch(thread) : complete(thread - kLevels);
  }
  void work_came(const Ticket&) override { changed_.notify_all(); }
  void wake_all() override { changed_.notify_all(); }

 private:
  struct Dispatched {
    Piece piece;
    std::shared_ptr<CudaEvent> event;
  };
  struct Channel {
    std::deque<Dispatched> in_flight;
    std::size_t fences = 0;   // callers of fence()
    bool dispatching = true;  // the dispatching thread runs
  };

  void dispatch(std::size_t level);
  void complete(std::size_t level);
  // Makes `stream` carry out a piece. `error` is that of the creation of the stream.
  void begin(const Piece& piece, CudaRuntime::Stream stream, int error);
  int copy(const Copy& run, CudaRuntime::Stream stream) const;
  // Copies single rows in one call.
  int copy_all(const std::vector<Copy>& rows, CudaRuntime::Stream stream) const;
  // Has `stream` copy a piece: its single rows in one call where the runtime has such a call. On an
  // error, sets `failed` to a copy that failed, and `copied` to the bytes of the others before.
  int copy(const Piece& piece, CudaRuntime::Stream stream, std::size_t& failed,
           std::int64_t& copied);
  Outcome failure(std::int64_t bytes, int error, const char* doing) const;

  const CudaRuntime runtime_;
  const int device_;
  const Limits limits_;
  std::array<Channel, kLevels> channels_;
  std::set<std::int64_t> attached_;  // IDs of regions; guarded by mutex_
  std::atomic<bool> batches_;        // the runtime has not refused a batched call
  std::condition_variable changed_;
};

}  // namespace sgl_ext::transfer
