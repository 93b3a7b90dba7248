// Reads and writes between host memory and files.
#pragma once

#include <map>

#include "io_backend.h"
#include "lane.h"

namespace sgl_ext::transfer {

class FileLane final : public Lane {
 public:
  struct Limits {
    std::size_t depth;          // reads and writes in flight, for each level
    std::int64_t bytes;         // in flight, for each level
    std::int64_t request;       // largest read or write
  };

  // Each level may have `limits.depth` requests of `limits.bytes` bytes in flight: an urgent
  // request never waits for a place, only for the device to end what it was given before.
  FileLane(std::shared_ptr<Hub> hub, std::unique_ptr<IoBackend> backend, const Limits& limits);

  // Throws std::invalid_argument.
  static void check(const Limits& limits);
  // What a backend of such a lane has to hold.
  static std::size_t capacity(const Limits& limits) { return kLevels * limits.depth; }

  const char* backend() const { return backend_->name(); }
  const Limits& limits() const { return limits_; }
  std::int64_t registered_bytes() const;

  std::optional<std::string> refuses(const Copy& copy, const Region& src,
                                     const Region& dst) const override;
  void attach(const Region& region) override;
  void detach(const Region& region) override;
  void start() override { start_threads(1); }

 protected:
  void work(std::size_t thread) override;
  void work_came(const Ticket& ticket) override;
  void wake_all() override { backend_->wake(); }

 private:
  struct Buffer {
    std::int64_t region, end;
    int slot;
  };

  unsigned admitted() const;
  bool refill();
  void prepare(Io& io) const;
  bool settle(Io& io, std::int64_t result);

  const Limits limits_;
  const std::unique_ptr<IoBackend> backend_;
  std::vector<Io> ios_;
  std::vector<Io*> idle_;
  bool asleep_ = false;                     // the thread has to be woken; guarded by mutex_
  std::map<std::int64_t, Buffer> buffers_;  // registered memory by address; guarded by mutex_
};

// A region for `fd`, which it takes over: a regular file or a device that can be read at offsets,
// as far as `length`. Offsets and addresses must be aligned if it is open with O_DIRECT. Throws
// std::invalid_argument.
std::shared_ptr<Region> file_region(int fd, std::int64_t length, const Lane& lane);

}  // namespace sgl_ext::transfer
