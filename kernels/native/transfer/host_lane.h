// Lane that copies within host memory on threads that share every large copy.
#pragma once

#include <condition_variable>

#include "lane.h"

namespace sgl_ext::transfer {

class HostLane final : public Lane {
 public:
  // An urgent ticket waits for at most one piece of `piece_bytes` bytes on each thread.
  HostLane(std::shared_ptr<Hub> hub, std::size_t threads, std::int64_t piece_bytes);

  std::size_t threads() const { return threads_; }
  std::optional<std::string> refuses(const Copy&, const Region& src,
                                     const Region& dst) const override;
  void start() override { start_threads(threads_); }

 protected:
  void work(std::size_t thread) override;
  void work_came(const Ticket& ticket) override;
  void wake_all() override { came_.notify_all(); }

 private:
  const std::size_t threads_;
  const Cut cut_;
  std::condition_variable came_;
};

}  // namespace sgl_ext::transfer
