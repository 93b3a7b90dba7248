// Lane that copies with the copy engines of a CUDA device (FastSwitch, section 3.2).
#pragma once

#include <condition_variable>
#include <deque>

#include "cuda_runtime.h"
#include "lane.h"

namespace sgl_ext::transfer {

class CudaLane final : public Lane {
 public:
  struct Limits {
    std::size_t dispatches;  // an event is recorded after this many copies
    std::int64_t bytes;      // or after this many bytes
    std::size_t events = 2;  // outstanding events per level
  };

  // Each level has its own thread and stream. The work dispatched per level is bounded, so that a
  // more urgent copy waits for that much work and not for everything submitted before it.
  CudaLane(std::shared_ptr<Hub> hub, const std::string& library, int device,
           const Limits& limits);

  const std::string& library() const { return runtime_.library; }
  int device() const { return device_; }
  std::optional<std::string> refuses(const Copy&, const Region& src,
                                     const Region& dst) const override;
  void start() override { start_threads(kLevels); }

 protected:
  void work(std::size_t level) override;
  void work_came(const Ticket&) override { came_.notify_all(); }
  void wake_all() override { came_.notify_all(); }

 private:
  // Pieces whose completion one event signals.
  struct Group {
    std::vector<Piece> pieces;
    std::int64_t bytes = 0;
    CudaRuntime::Event event = nullptr;
    int error = 0;
  };

  int dispatch(const Piece& piece, CudaRuntime::Stream stream);
  void record(Group& group, CudaRuntime::Stream stream);
  void complete(Group& group);
  Outcome outcome(const Piece& piece, int error, const char* doing) const;

  const CudaRuntime runtime_;
  const int device_;
  const Limits limits_;
  std::condition_variable came_;
};

}  // namespace sgl_ext::transfer
